# A stock vLLM image plus the plugin, which has no dependencies. The folder of the plugin is the whole context:
#
#   docker build -f deploy/docker/vllm-plugin.Dockerfile -t vllm-wadiloco sidecar/vllm_plugin
#
# vLLM loads the stat logger by itself; the middleware is an argument of the server:
#   docker run … vllm-wadiloco --model … --middleware wadiloco_vllm_plugin.InFlightMiddleware
#
# VLLM_IMAGE  any image whose python3 is vLLM's and has pip
# VLLM_USER   who runs the server, and therefore owns the gate (user 2000 is the one of vLLM's own images)
ARG VLLM_IMAGE=vllm/vllm-openai:v0.32.0
ARG PYTHON_IMAGE=python:3.11-slim

FROM ${PYTHON_IMAGE} AS wheel
ARG PIP_INDEX_URL=""
WORKDIR /src
COPY pyproject.toml *.py ./
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    python3 -m venv /tools && /tools/bin/pip wheel -q --no-cache-dir --no-deps --wheel-dir /dist .

FROM ${VLLM_IMAGE}
ARG VLLM_USER=2000:0
USER root
# The variable is for images whose Python belongs to the distribution; pips that do not know it do not need it.
RUN --mount=type=bind,from=wheel,source=/dist,target=/dist \
    PIP_BREAK_SYSTEM_PACKAGES=1 PIP_ROOT_USER_ACTION=ignore \
    python3 -m pip install -q --no-cache-dir --no-deps --no-index /dist/*.whl \
    && install -d -o ${VLLM_USER%%:*} -g 0 -m 0755 /run/wadiloco/gate
ENV WADILOCO_GATE_DIR=/run/wadiloco/gate
USER ${VLLM_USER}
