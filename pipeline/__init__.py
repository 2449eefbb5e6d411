"""The pipeline from rows of users and items to knowledge texts and features."""

import os

# Threads of torch and numba wait for each other after every loop. By default libgomp lets a waiting thread spin 300,000
# times before it sleeps. On cores shared with other processes, a step with two threads then took ten times as long as
# with one thread. libgomp reads the variable when torch is imported.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
