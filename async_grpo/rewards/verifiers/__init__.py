"""The built-in verifiers: `(completion, reference answer) -> score`, pure functions without state or I/O.

- `answers`   answer tags, GSM8K
- `text`      answers compared as texts
- `symbolic`  mathematics, by math-verify
- `prm800k`   short answers, by the rules of OpenAI's grader
- `logic`     knights and knaves
- `boxed`     `\\boxed{..}`, and rules for the form of a completion
- `latex`     LaTeX as plain text

A verifier scores; it never guesses. Where it cannot judge (for example a reference that is not a number), it raises
ValueError, and the sample becomes `unverifiable`, which is not a score of 0.
"""
