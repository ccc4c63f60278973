# zerowatch with its demo. Built from the checkout's folder:
#
#     docker build -f docker/trainer.Dockerfile -t zerowatch/trainer:cpu .
#
# Also by the classic builder of docker-compose 1.29, so without cache mounts and here-documents.
ARG PYTHON_IMAGE=python:3.11-slim-bookworm
FROM ${PYTHON_IMAGE} AS packages

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

# The sources are in this stage only.
FROM packages AS wheel
# For runtime/common/_hot_path.c. Without a compiler the same classes in Python are used.
RUN { apt-get -qq update && apt-get -qq install --no-install-recommends gcc libc6-dev; } >/dev/null \
 || echo "no compiler: the wheel has no extension"
COPY . .
RUN pip wheel -q --no-deps --no-build-isolation --wheel-dir /wheel .

# A new layer of a few MB on those of `packages`: a push or pull of changed code moves no more.
FROM packages
COPY --from=wheel /wheel /wheel
RUN pip install --no-cache-dir -q --no-deps /wheel/*.whl \
 && useradd --uid 10001 --create-home zerowatch \
 && install -d -o zerowatch -g zerowatch /runs

USER 10001:10001
# What is written beside the run folder goes to /tmp: the rest may be read-only.
ENV HOME=/tmp TRITON_CACHE_DIR=/tmp/triton
WORKDIR /runs
ENTRYPOINT ["zerowatch"]
CMD ["demo"]
