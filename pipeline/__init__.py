"""From entity rows to knowledge and features."""

import os

# Threads of torch and numba wait for each other after every loop. By default libgomp has them do so at full speed for
# some 17 ms; on cores that other processes use as well, those then wait for each other, and a step of two threads takes
# ten times as long as that of one. This is some 50 us, after which they sleep. libgomp reads it as torch is imported.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
