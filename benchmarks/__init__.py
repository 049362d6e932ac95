"""Step times of compiled programs against what one would write by hand: `python -m benchmarks`."""
