"""Rewards: pure verifiers, and the pool of killable processes that runs them.

- `verifiers`  what a completion is worth: pure functions, by name
- `frames`     length-prefixed MessagePack, the language of the pipes
- `verdict`    the judgement of one completion
- `pool`       the asyncio front: groups in, verdicts out
- `slot`       one worker process and its replacements
- `worker`     what runs in that process
"""

from async_grpo.rewards.verifiers import Verifier, load_verifiers

__all__ = ["Verifier", "load_verifiers"]
