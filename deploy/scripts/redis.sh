#!/bin/sh
# redis.sh ARGUMENT...: start the replay buffer's server with its required settings (docs/buffer-redis.md): no eviction,
# and an append-only file that is synced before every acknowledgement. The password is passed in a file on the
# container's tmpfs, because command-line arguments are visible to all processes. ARGUMENTs go to the server.
set -eu

umask 077
config=$(mktemp)
secret=$(cat "${SECRETS_DIR:-/run/secrets}/ASYNC_GRPO_REDIS_PASSWORD")
printf 'requirepass %s\n' "$secret" >"$config"

exec redis-server "$config" \
    --appendonly yes \
    --appendfsync "${REDIS_FSYNC:-always}" \
    --save '' \
    --maxmemory "${REDIS_MAXMEMORY:-4gb}" \
    --maxmemory-policy noeviction \
    "$@"
