"""Statistics of graded completions: pure arithmetic, shared by a run's milestones and `async-grpo eval`.

    scores and extracted answers of k completions per prompt --> EvalMetrics, each metric with its 95% interval

- `estimators`  pass@k and maj@k of one prompt; a mean over prompts and its bootstrap interval
- `summary`     all metrics, overall and by source, and their text
"""
