# Throttles the network interface that it shares with another container, and shows what passes.
FROM debian:bookworm-slim
RUN apt-get update -qq \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends iproute2 \
 && rm -rf /var/lib/apt/lists/*
COPY link.sh /link.sh
ENTRYPOINT ["/bin/sh", "/link.sh"]
