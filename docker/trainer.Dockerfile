# zerowatch with its demo. Built from the checkout's folder:
#
#     docker build -f docker/trainer.Dockerfile -t zerowatch/trainer:cpu .
#
# Also by the classic builder, so without mounts and here-documents.
ARG PYTHON_IMAGE=python:3.11-slim-bookworm
FROM ${PYTHON_IMAGE}

# Where pip finds a torch without CUDA, beside its usual index; empty for the one with CUDA. pip takes
# the build for the CPU, as 2.13.0+cpu counts as newer than 2.13.0. PIP_FIND_LINKS, if the base image
# sets it, does the same with a folder of wheels.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu

ENV PATH=/opt/zerowatch/bin:$PATH PYTHONUNBUFFERED=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python3 -m venv /opt/zerowatch

WORKDIR /source
COPY pyproject.toml constraints.txt ./
# What zerowatch needs, in a layer that a change of its own code leaves as it is. Without build
# isolation pinned setuptools builds DeepSpeed, and no second torch is fetched.
RUN python -c "import tomllib; project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
print(*project['dependencies'], *project['optional-dependencies']['otel'], sep='\n')" >needed.txt \
 && export PIP_EXTRA_INDEX_URL="${TORCH_INDEX}" DS_BUILD_OPS=0 \
 && pip install --no-cache-dir -q -c constraints.txt pip setuptools \
 && pip install --no-cache-dir -q -c constraints.txt torch \
 && pip install --no-cache-dir -q -c constraints.txt --no-build-isolation -r needed.txt

COPY . .
RUN pip install --no-cache-dir -q --no-deps --no-build-isolation . \
 && useradd --uid 10001 --create-home zerowatch \
 && install -d -o zerowatch -g zerowatch /runs

USER 10001:10001
# What is written beside the run folder goes to /tmp: the rest may be read-only.
ENV HOME=/tmp TRITON_CACHE_DIR=/tmp/triton
WORKDIR /runs
ENTRYPOINT ["zerowatch"]
CMD ["demo"]
