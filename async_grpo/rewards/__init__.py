"""Rewards: pure verifiers, the pool of killable processes that runs them, judges behind HTTP.

- `verifiers`, `symbolic`  what a completion is worth: pure functions (`accuracy`, `formats`, `logic`, `prm800k` too)
- `resolve`, `score`       from a name to a function, from its value to a score
- `item`, `verdict`        what is judged, and the judgement
- `overlong`               what becomes of samples that ran out of tokens
- `pool`                   the asyncio front: items in, verdicts out
- `slot`                   one worker at a time and its replacements
- `warden_link`, `warden`  the process that starts workers, watches and buries them
- `worker`                 what runs in a verifier process
- `frames`                 the language between these processes
- `memory`, `environment`  what the kernel says about processes, and what they may see
- `http_judge`             a judge behind HTTP
- `check`                  a look at the reward functions before anything starts
"""
