"""The rollout servers' end of the weight plane.

- `client`     `WeightReceiver`: a rollout server's handle on the receiver of its machine
- `place`      where that lies, and how the first server starts it
- `process`    the receiver process: fetches, verifies, relays, tells the servers
- `local`      its Unix socket to the servers
- `uplink`     its line to the publisher; `source` that to whom it fetches from
- `fetch`      one version on its way in; `plan` says what to ask for
- `keeper`     the two slots of the store
"""

from async_grpo.weights.receiver.client import WeightReceiver

__all__ = ["WeightReceiver"]
