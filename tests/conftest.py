"""What every test stands on: one thread a process, and hypothesis without chance or clock."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from hypothesis import settings

settings.register_profile("shardc", derandomize=True, deadline=None, database=None)
settings.load_profile("shardc")
