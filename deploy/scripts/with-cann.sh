#!/bin/bash
# with-cann.sh COMMAND...: run COMMAND in CANN's environment, which CANN's scripts set only for login shells.
set -e

for script in /usr/local/Ascend/ascend-toolkit/set_env.sh /usr/local/Ascend/nnal/atb/set_env.sh; do
    if [ -r "$script" ]; then
        # shellcheck disable=SC1090
        source "$script"
    fi
done

if [ -z "${TASK_QUEUE_ENABLE:-}" ]; then
    unset TASK_QUEUE_ENABLE         # an empty value would mean 0; trainers and engines have different defaults
fi

exec "$@"
