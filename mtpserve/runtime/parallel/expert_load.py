"""Counts of how often each expert of each layer is chosen, in a file: `mtpserve experts` places them by
it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from time import monotonic

import torch
from torch import Tensor

EVERY_S = 10.0  # between two writings, while there is work


class ExpertLoad:
    """JSON: {"3": [rows that chose expert 0, …], …}, of the rows that this engine's requests had. What the
    trial at start computes is not counted."""

    def __init__(self, file: Path) -> None:
        self.file, self.last_write = file, monotonic()
        self.counts: dict[int, Tensor] = {}
        self.started = False

    def count(self, layer: int, topk_ids: Tensor, experts: int) -> None:
        counts = torch.bincount(topk_ids.flatten(), minlength=experts)[:experts]
        self.counts[layer] = self.counts[layer] + counts if layer in self.counts else counts

    def tick(self, idle: bool) -> None:
        """Ends a tick; `idle`: no engine had work in it."""
        if not self.started:
            self.started, self.counts = True, {}
        elif self.counts and (idle or monotonic() - self.last_write > EVERY_S):
            new_file = self.file.with_name(f"{self.file.name}.new")
            new_file.write_text(
                json.dumps({layer: self.counts[layer].tolist() for layer in sorted(self.counts)}) + "\n"
            )
            os.replace(new_file, self.file)
            self.last_write = monotonic()
