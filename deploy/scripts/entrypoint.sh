#!/bin/sh
# entrypoint.sh COMMAND...: run COMMAND with the container's secrets in its environment and, optionally, its own devices.
#
# Every file SECRETS_DIR/ASYNC_GRPO_* becomes the environment variable of its name, unless the variable is set.
#
# DEVICE_SETS="0,1 2,3" distributes devices over identical containers: VISIBLE_DEVICES_VARIABLE is set to the first set
# that is free. A container locks its set's file in DEVICE_LOCKS, a folder that all containers of the machine share.
# COMMAND inherits the lock, so the kernel releases it when COMMAND ends, even if it is killed.
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
    echo "all of DEVICE_SETS ($DEVICE_SETS) are in use by other containers. Start fewer containers, or add sets" >&2
    exit 1
}

if [ -n "${DEVICE_SETS:-}" ]; then
    take_devices
fi

exec "$@"
