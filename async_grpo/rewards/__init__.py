"""Rewards: pure verifiers, the pool of killable processes that runs them, judges behind HTTP.

- `verifiers`   the built-in verifiers: pure functions from completion and reference answer to a score
- `base`        what a reward sees (RewardInput) and gives (RewardResult, RewardFailure); the overlong rule
- `registry`    from the name of a reward function to a callable
- `pool`        RewardPool: completions in, results out
- `workers`     the verifier processes and their supervisor
- `http_judge`  a judge behind HTTP
"""
