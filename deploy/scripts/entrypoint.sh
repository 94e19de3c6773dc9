#!/bin/sh
# entrypoint.sh COMMAND...: COMMAND, with the secrets of this container in its environment and devices of its own.
#
# Every file SECRETS_DIR/ASYNC_GRPO_* becomes the variable of its name, unless that is set.
#
# DEVICE_SETS="0,1 2,3" deals devices out to containers that are all alike: the first set that nobody holds becomes
# VISIBLE_DEVICES_VARIABLE. A set is held by a lock on a file of DEVICE_LOCKS, a folder that the containers of one
# machine share. The lock belongs to COMMAND, and the kernel takes it away when COMMAND ends, however that happens.
set -eu

for file in "${SECRETS_DIR:-/run/secrets}"/ASYNC_GRPO_*; do
    name=${file##*/}
    if [ -r "$file" ] && [ -z "$(printenv "$name" || true)" ]; then
        export "$name=$(cat "$file")"
    fi
done

take_devices() {
    for devices in $DEVICE_SETS; do
        exec 9>"${DEVICE_LOCKS:-/run/devices}/$devices"
        if flock -n 9; then
            export "$VISIBLE_DEVICES_VARIABLE=$devices"
            return
        fi
    done
    echo "all of DEVICE_SETS ($DEVICE_SETS) are held by other containers. Start fewer, or name more" >&2
    exit 1
}

if [ -n "${DEVICE_SETS:-}" ]; then
    take_devices
fi

exec "$@"
