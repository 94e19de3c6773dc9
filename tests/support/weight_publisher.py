"""A trainer that trains nothing: publishes versions through the transport of a run, to be killed at any moment.

    python -m tests.support.weight_publisher RUN EPOCH

RUN is a RunConfig as JSON. Says its address first; each line on its input is a version to publish, and is answered.
"""

from __future__ import annotations

import sys

from async_grpo.config import RunConfig
from async_grpo.weights import make_sender
from async_grpo.wire import encode
from tests.support.speech import Speech
from tests.support.weight_plane import LAYOUT, Arrays, random_weights, step


def weights_of(epoch: int, version: int) -> Arrays:
    """Neighbouring versions have most of their bytes in common."""
    return step(random_weights(0), 1000 * epoch + version)


def serve(config: RunConfig, epoch: int) -> None:
    speech = Speech()
    sender = make_sender(config, LAYOUT, epoch)
    speech.say({"address": encode(sender.address).hex()})
    for version in map(int, sys.stdin):
        sender.publish_weights(version, weights_of(epoch, version).items())
        speech.say({"version": version})
    sender.close()


if __name__ == "__main__":
    serve(RunConfig.model_validate_json(sys.argv[1]), int(sys.argv[2]))
