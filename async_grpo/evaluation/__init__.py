"""What graded completions say about a policy: pure arithmetic, the same for a run's milestones and `async-grpo eval`.

    scores and extracted answers of k completions a prompt --> Figures, each with its 95% interval

The cast:

- `grades`      what is known of each completion of a prompt
- `estimators`  pass@k and maj@k of one prompt
- `bootstrap`   from prompts to a mean and its interval
- `figures`     all of them together, over everything and by source
- `words`       the figures as text
"""
