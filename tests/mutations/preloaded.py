"""What each test would import first: a process that has it is forked for each run of pytest, which saves three of four seconds."""

from __future__ import annotations

import os

# As tests/conftest.py does before the same imports.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import hypothesis  # noqa: F401
import pytest  # noqa: F401
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import transformers  # noqa: F401
