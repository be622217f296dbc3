# A server on Atlas A3 (CHIP=a3) or A2 (CHIP=910b), from the wheel in dist/ and the public images of CANN:
#   python -m build --wheel && docker build -f docs/container/npu.Dockerfile --build-arg CHIP=a3 -t npucompile:a3 .
# The runtime of Ascend for containers adds driver and devices. A pair wants --build-arg EXTRAS=npu-run,kv-transfer-npu.
ARG CANN=9.1.0
ARG CHIP=a3
# hadolint ignore=DL3006
FROM quay.io/ascend/cann:${CANN}-${CHIP}-ubuntu22.04-py3.12
ARG EXTRAS=npu-run
SHELL ["/bin/bash", "-o", "pipefail", "-c"]

# Mooncake's engine wants libibverbs.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends libibverbs1 \
    && rm -rf /var/lib/apt/lists/*

# hadolint ignore=DL3013
RUN --mount=type=bind,source=dist,target=/dist \
    wheels=(/dist/npucompile-*.whl) \
    && pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu "${wheels[0]}[${EXTRAS}]"

# The driver gives devices to the group 1000, HwHiAiUser.
RUN { getent group 1000 || groupadd --gid 1000 HwHiAiUser; } \
    && useradd --create-home --uid 10001 --gid 1000 npucompile \
    && install -d -o npucompile -g 1000 /data
USER 10001
ENV NPUCOMPILE_HOME=/data
VOLUME /data
EXPOSE 8000

# It answers while a model is still loaded; /ready says when that is done.
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
STOPSIGNAL SIGTERM
# By release CANN is in one of these two places.
ENTRYPOINT ["/bin/bash", "-c", "for file in /usr/local/Ascend/{cann,ascend-toolkit}/set_env.sh; do [ ! -f $file ] || . $file; done; exec npucompile \"$@\"", "npucompile"]
CMD ["serve", "--host", "0.0.0.0"]
