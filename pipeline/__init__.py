"""From entity rows to knowledge and features."""

import os

# Threads of torch and numba wait for each other after every loop. By default libgomp has them turn 300,000 times before
# they sleep; on cores that other processes use as well, a step of two threads then took ten times as long as that of
# one. libgomp reads this as torch is imported.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
