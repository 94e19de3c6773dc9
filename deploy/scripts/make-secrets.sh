#!/bin/sh
# make-secrets.sh FOLDER PATH...: write a secret to every FOLDER/PATH, such as http/ASYNC_GRPO_HTTP_KEY, and Redis'
# configuration to FOLDER/redis/redis.conf. Prints only names.
#
# A secret is the environment variable of its file's name if that is set, else the file's present content, else 32 random
# bytes in hexadecimal. All users of a container may read the files: each container mounts only the folders that it needs.
set -eu

folder=$1
shift
umask 022

# Rename a complete file, so that no role reads a partial one.
write() {
    cat >"$1.new"
    chmod 444 "$1.new"
    mv -f "$1.new" "$1"
}

for path in "$@"; do
    name=${path##*/}
    secret=$(printenv "$name" || true)
    if [ -z "$secret" ] && [ -s "$folder/$path" ]; then
        continue
    fi
    # Redis reads the password from a configuration file, where quotes, spaces and backslashes have a meaning.
    case "$secret" in
        *[!A-Za-z0-9._~+/=-]*)
            echo "$name has a character with a special meaning in redis.conf. Use only A-Z a-z 0-9 . _ ~ + / = -" >&2
            exit 1
            ;;
    esac
    if [ -n "$secret" ] && [ "${#secret}" -lt 16 ]; then
        echo "$name has ${#secret} characters: too few to be safe. Use at least 16, or leave it out for a random one" >&2
        exit 1
    fi
    if [ -z "$secret" ]; then
        secret=$(head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \n')
        echo "made $name"
    fi
    printf '%s' "$secret" | write "$folder/$path"
done

if [ -n "${REDIS_MAXMEMORY:-}" ]; then
    echo "REDIS_MAXMEMORY is not read any more. Set REDIS_MEMORY, the limit of the whole container, to twice that" >&2
    exit 1
fi
memory=${REDIS_MEMORY:-8gb}
number=${memory%[gm]b}
case "$number" in
    "$memory" | "" | *[!0-9]*)
        echo "REDIS_MEMORY is $memory. Use a whole number of gb or mb, such as 8gb" >&2
        exit 1
        ;;
esac
half_mib=$((number * 512))
if [ "$memory" = "${number}mb" ]; then
    half_mib=$((number / 2))
fi

# The password is in a file, because all processes can read command-line arguments. maxmemory is half of the container's
# limit: rewriting the append-only file forks Redis, and while groups come and go the copy may need as much again.
write "$folder/redis/redis.conf" <<END
requirepass $(cat "$folder/redis/ASYNC_GRPO_REDIS_PASSWORD")
maxmemory ${half_mib}mb
END
