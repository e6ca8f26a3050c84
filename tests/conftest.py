"""For every test: few threads, since several processes share the machine; no look at the network; kernels interpreted without a GPU."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # there is a process for each core: two threads of each would wait for each other
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch

if not torch.cuda.is_available():
    # Before triton is imported, which transformers does too: its own functions are interpreted, or never.
    os.environ["TRITON_INTERPRET"] = "1"
