"""For every test: few threads, since several processes share the machine, and no look at the network."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # there is a process for each core: two threads of each would wait for each other
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
