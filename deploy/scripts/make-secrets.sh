#!/bin/sh
# make-secrets.sh FOLDER NAME...: write a secret to every FOLDER/NAME. It is the environment variable NAME if that is
# set, else the file's present content, else 32 random bytes in hexadecimal. Prints only names.
set -eu

folder=$1
shift
umask 022

for name in "$@"; do
    secret=$(printenv "$name" || true)
    if [ -z "$secret" ] && [ -s "$folder/$name" ]; then
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

    # Rename a complete file, so that no role reads a partial secret.
    printf '%s' "$secret" >"$folder/.$name"
    chmod 444 "$folder/.$name"
    mv -f "$folder/.$name" "$folder/$name"
done
