"""The trainer's end of the weight plane.

- `client`     `ZmqWeightSender`: copies into shared memory, and goes on
- `process`    the publisher process: announces, tracks the receivers, serves
- `encoder`    hashes and patches, on threads
- `tree`       who fetches from whom
"""

from async_grpo.weights.zmq.sender import Publication, ZmqWeightSender

__all__ = ["Publication", "ZmqWeightSender"]
