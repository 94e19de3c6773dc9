#!/bin/sh
# entrypoint.sh COMMAND...: run COMMAND with the container's secrets in its environment and, optionally, its own devices.
#
# Every file ASYNC_GRPO_* in SECRETS_DIR or its folders becomes the environment variable of its name, unless the variable
# is set.
#
# DEVICE_SETS="0,1 2,3" distributes devices over identical containers: VISIBLE_DEVICES_VARIABLE is set to the first set
# that is free. A container locks its set's file in DEVICE_LOCKS, a folder that all containers of the machine share.
# COMMAND inherits the lock, so the kernel releases it when COMMAND ends, even if it is killed.
#
# EXIT_CODE_WHEN_STOPPED=75 replaces exit code 0 after SIGTERM.
set -eu

secrets=${SECRETS_DIR:-/run/secrets}
for file in "$secrets"/ASYNC_GRPO_* "$secrets"/*/ASYNC_GRPO_*; do
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

if [ -z "${EXIT_CODE_WHEN_STOPPED:-}" ]; then
    exec "$@"
fi

stopped=
interrupted=
command=
stop() {
    stopped=1
    interrupted=1
    if [ -n "$command" ]; then
        kill -TERM "$command" 2>/dev/null || true
    fi
}
trap stop TERM INT

exec 3<&0       # a command in the background would read /dev/null
"$@" <&3 3<&- &
command=$!
if [ -n "$stopped" ]; then
    stop        # the signal came before COMMAND was started
fi

code=0
wait "$command" || code=$?
while [ -n "$interrupted" ]; do
    # The signal has ended `wait`, not COMMAND. If both ended together, the shell does not know COMMAND any more (127).
    interrupted=
    again=0
    wait "$command" || again=$?
    if [ "$again" != 127 ]; then
        code=$again
    fi
done
if [ -n "$stopped" ] && [ "$code" = 0 ]; then
    code=$EXIT_CODE_WHEN_STOPPED
fi
exit "$code"
