# A server on CPUs, from the wheel in dist/:
#   python -m build --wheel && docker build -f docs/container/cpu.Dockerfile -t npucompile:cpu .
#   docker run -p 8000:8000 -v state:/data npucompile:cpu
FROM python:3.12-slim-bookworm

# Builds compile kernels of their own graphs.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*

# The index of torch has builds without CUDA.
RUN --mount=type=bind,source=dist,target=/dist \
    pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu /dist/npucompile-*.whl

RUN useradd --create-home --uid 10001 npucompile \
    && install -d -o npucompile -g npucompile /data
USER 10001
ENV NPUCOMPILE_HOME=/data
VOLUME /data
EXPOSE 8000

# It answers while a model is still built or loaded; /ready says when that is done.
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["npucompile"]
CMD ["serve", "--host", "0.0.0.0"]
