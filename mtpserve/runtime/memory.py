"""What goes where in memory, decided before the KV pool exists: everything else is counted first, the pool gets the rest."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from mtpserve.config import EngineConfig
from mtpserve.core.arch import ModelArch
from mtpserve.core.errors import ConfigError

CPU_FRACTION, GPU_FRACTION = 0.1, 0.85
SHARE_OF_CONTEXT = 8  # a typical request fills this part of the context: concurrency is the pool over that
ESTIMATE = " (estimate)"  # behind the names of rows that nobody can count before


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    rows: list[tuple[str, int]]  # what, bytes
    pages: int
    max_running: int
    context_length: int

    @property
    def total(self) -> int:
        return sum(size for _, size in self.rows)


@dataclass(frozen=True, slots=True)
class Fixed:
    """Bytes that are there whoever is served. Embedding and head are counted once."""

    trunk: int
    mtp: int
    reduced: int  # the copy of the head's rows that drafting multiplies
    itemsize: int  # of what the model computes with


Sizes = Callable[[int], int]  # of running requests, in bytes


def plan_memory(
    config: EngineConfig,
    arch: ModelArch,
    stored: torch.dtype,
    device: torch.device,
    fixed: Fixed,
    lookahead: int,
    state: Sizes,
    tables: Sizes,
) -> MemoryPlan:
    """`stored`: what keys and values are stored in. `state` is what every seat has, `tables` what seats get once somebody asks for a
    penalty or a bias. Raises ConfigError where nothing is left for the pool."""
    spec, page_size, scheduler = config.spec, config.cache.page_size, config.scheduler
    context = arch.max_positions if config.model.context_length is None else config.model.context_length
    per_token = {kind: arch.layers.count(kind) * kind.kv.numbers * stored.itemsize for kind in arch.layers}  # by store
    token, ahead = sum(per_token.values()), lookahead
    # More requests than fit into one step would take turns.
    most = scheduler.max_running_requests or max(1, scheduler.chunked_prefill_size // (spec.nodes + 1))
    weights, total = fixed.trunk + fixed.mtp + fixed.reduced, config.cache.max_total_tokens

    def working(running: int) -> list[tuple[str, int]]:
        rows = workspace(config, arch, fixed.itemsize, running)
        captured = rows if device.type == "cuda" and not scheduler.disable_cuda_graph else 0
        return [
            ("request state", state(running)),
            ("tables of penalties and biases, once asked for", tables(running)),
            (f"one step's numbers{ESTIMATE}", rows),
            (f"captured steps{ESTIMATE}", captured),
        ]

    if total is None:
        fraction = config.cache.mem_fraction_static or (GPU_FRACTION if device.type == "cuda" else CPU_FRACTION)
        budget = int(usable_memory(device) * fraction) - weights
        running = scheduler.max_running_requests or concurrency(max(budget, 0) // token, context, most)
        budget -= sum(size for _, size in working(running)) + page_size * token
        total = min(budget // token, running * (context + ahead + page_size))
    else:
        running = scheduler.max_running_requests or concurrency(total, context, most)
    pages = total // page_size
    if pages < 1:
        raise ConfigError(
            f"no memory is left for the KV pool: weights take {weights:,} bytes; raise --mem-fraction-static or set --max-total-tokens"
        )
    kept = min(running * ahead, pages * page_size)
    plain = pages * page_size - kept
    rows = [
        ("weights", fixed.trunk),
        ("weights, MTP layer", fixed.mtp),
        ("draft head, reduced", fixed.reduced),
        *working(running),
        *((f"KV, {plain:,} tokens in {arch.layers.count(kind)} layers ({kind})", plain * size) for kind, size in per_token.items()),
        (f"KV, kept ahead: {running} requests x {ahead} tokens", kept * token),
        ("KV, the page that pads batches", page_size * token),
    ]
    return MemoryPlan([row for row in rows if row[1]], pages, running, context)


def concurrency(tokens: int, context: int, most: int) -> int:
    return max(1, min(most, tokens * SHARE_OF_CONTEXT // context))


def workspace(config: EngineConfig, arch: ModelArch, itemsize: int, running: int) -> int:
    """The widest layer's numbers, of a step that fills its budget, and the logits in float32 with three copies on their way to tokens."""
    rows = config.scheduler.chunked_prefill_size
    inner = arch.intermediate if arch.moe is None else max(arch.intermediate, arch.moe.size * (arch.moe.top_k + arch.moe.shared))
    layer = 4 * arch.hidden + 3 * inner + 2 * arch.heads * max(kind.kv.key_dim for kind in arch.layers)
    sampled = min(rows, running * (config.spec.nodes + 1))
    return rows * layer * itemsize + sampled * arch.vocab * 4 * 4


def usable_memory(device: torch.device) -> int:
    """Bytes, of which `--mem-fraction-static` is a share. On a GPU what is free now, before weights are loaded: other processes keep what
    they have. On a CPU all that the machine has, since what counts as free there changes with every file that is read."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
