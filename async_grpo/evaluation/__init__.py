"""Statistics of graded completions: pure arithmetic, the same for a run's milestones and `async-grpo eval`.

    scores and extracted answers of k completions a prompt --> EvalMetrics, each figure with its 95% interval

- `estimators`  pass@k and maj@k of one prompt; a mean over prompts and its bootstrap interval
- `summary`     all figures, overall and by source, and their text
"""
