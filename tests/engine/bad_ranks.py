"""A logits processor that does something else in ranks other than 0, to see what becomes of the engine."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping

from torch import Tensor

NAME = "tests.engine.bad_ranks:Bad"
IN_ANOTHER = sys.argv[0].endswith("engine/startup/rank.py")


class Bad:
    """What it does is the request's `bad`; at start the environment's BAD_RANK."""

    def __init__(self) -> None:
        what = os.environ.get("BAD_RANK") if IN_ANOTHER else None
        if what == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "refuses":
            raise RuntimeError("not in this rank")

    def __call__(self, tokens: list[int], prompt_len: int, params: Mapping[str, object], logits: Tensor) -> Tensor:
        what = params.get("bad") if IN_ANOTHER else None
        if what == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        return logits.roll(1) if what == "differs" else logits
