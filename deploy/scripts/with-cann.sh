#!/bin/bash
# with-cann.sh COMMAND...: COMMAND in the environment of CANN, which its own scripts set for shells that log in only.
set -e

for script in /usr/local/Ascend/ascend-toolkit/set_env.sh /usr/local/Ascend/nnal/atb/set_env.sh; do
    if [ -r "$script" ]; then
        # shellcheck disable=SC1090
        source "$script"
    fi
done

if [ -z "${TASK_QUEUE_ENABLE:-}" ]; then
    unset TASK_QUEUE_ENABLE         # empty would mean 0; trainers and engines have defaults of their own
fi

exec "$@"
