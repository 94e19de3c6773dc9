"""Rewards: pure verifiers, the pool of killable processes that runs them, and HTTP judges.

- `verifiers`   the built-in verifiers: pure functions from completion and reference answer to a score
- `base`        input (RewardInput) and results (RewardResult, RewardFailure) of reward functions; the overlong rule
- `registry`    loads reward functions by name
- `pool`        RewardPool: judges completions with all reward functions
- `workers`     the verifier processes and their supervisor
- `http_judge`  HTTP judges
"""
