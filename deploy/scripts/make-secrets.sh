#!/bin/sh
# make-secrets.sh FOLDER NAME...: FOLDER/NAME holds a secret. The environment's variable of that name, if it is set;
# else what is there already; else 32 random bytes in hexadecimal. Nothing is printed but names.
set -eu

folder=$1
shift
umask 022

for name in "$@"; do
    given=$(printenv "$name" || true)
    if [ -z "$given" ] && [ -s "$folder/$name" ]; then
        continue
    fi
    case "$given" in
        *[!A-Za-z0-9._~+/=-]*)
            echo "$name holds a character that a server's file would read otherwise. Use A-Z a-z 0-9 . _ ~ + / = -" >&2
            exit 1
            ;;
    esac
    if [ -n "$given" ] && [ "${#given}" -lt 16 ]; then
        echo "$name has ${#given} characters: too few to be safe. Use at least 16, or leave it out for a random one" >&2
        exit 1
    fi
    if [ -z "$given" ]; then
        given=$(head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \n')
        echo "made $name"
    fi
    printf '%s' "$given" >"$folder/.$name"
    chmod 444 "$folder/.$name"
    mv -f "$folder/.$name" "$folder/$name"
done
