"""Tools around runs: no training run imports them. They simulate, tune, sweep, show, check, compare and import."""
