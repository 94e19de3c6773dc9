#!/bin/sh
# The server of the replay buffer, with the settings that it demands (docs/buffer-redis.md): no eviction, and an append-only
# file that is synced at every acknowledged write. The password goes through a file of this container's memory, so
# that no list of processes shows it. Further arguments go to the server.
set -eu

umask 077
own=$(mktemp)
secret=$(cat "${SECRETS_DIR:-/run/secrets}/ASYNC_GRPO_REDIS_PASSWORD")
printf 'requirepass %s\n' "$secret" >"$own"

exec redis-server "$own" \
    --appendonly yes \
    --appendfsync "${REDIS_FSYNC:-always}" \
    --save '' \
    --maxmemory "${REDIS_MAXMEMORY:-4gb}" \
    --maxmemory-policy noeviction \
    "$@"
