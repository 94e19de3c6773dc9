"""Seeds of samples: the same run gives the same seeds, on whichever server a sample is generated."""

from __future__ import annotations

import hashlib


def sample_seed(run_seed: int, *names: int | str) -> int:
    """A seed in [0, 2^63) from the run's seed and what names the sample.

    A stable hash (BLAKE2b), unlike `hash()`: it does not depend on the process.

    >>> sample_seed(1, "train", 7, 0, 1) == sample_seed(1, "train", 7, 0, 1)
    True
    """
    text = "/".join(str(name) for name in (run_seed, *names))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
