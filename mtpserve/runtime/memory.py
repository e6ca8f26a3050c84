"""What goes where in memory, decided before the KV pool exists: everything else is counted first, the pool
gets the rest."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil

import torch
from mtpserve_kernels.tiling import MAX_SCORES

from mtpserve.cache.pool import FP8, SCALE_BYTES
from mtpserve.config import EngineConfig
from mtpserve.core.arch.model import Attention, ModelArch, attention_kinds, page_groups, recurrent_kinds
from mtpserve.core.errors import NoRoom
from mtpserve.runtime.parallel.routed import token_bytes
from mtpserve.spec.sizes import spec_sizes

CPU_FRACTION, GPU_FRACTION = 0.1, 0.85
# as many states are kept as requests have, or as fit into a part of the pool's memory
STATES_EACH, STATES_PART = 4, 4
SHARE_OF_CONTEXT = 8  # a typical request fills this part of the context: concurrency is the pool over that
ESTIMATE = " (estimate)"  # after the names of rows that cannot be counted in advance


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    rows: list[tuple[str, int]]  # what, bytes
    pages: tuple[int, ...]  # by group, see core.arch.model.page_groups
    states: int  # recurrent layers' states that are kept for requests with the same prefix
    max_running: int
    context_length: int

    @property
    def counted(self) -> str:
        """The pages, for people."""
        return " + ".join(map(str, self.pages))

    @property
    def total(self) -> int:
        return sum(size for _, size in self.rows)


@dataclass(frozen=True, slots=True)
class Fixed:
    """Bytes that do not depend on the requests. Embedding and head are counted once."""

    trunk: int
    draft: int  # an MTP layer, or another draft model
    reduced: int  # the copy of the head's rows that drafting multiplies
    itemsize: int  # bytes of a number that the model computes with
    what: str = "MTP layer"  # the draft model, for people

    @property
    def rows(self) -> list[tuple[str, int]]:
        return [
            ("weights", self.trunk),
            (f"weights, {self.what}", self.draft),
            ("draft head, reduced", self.reduced),
        ]


Sizes = Callable[[int], int]  # running requests → bytes


def state_sizes(arch: ModelArch, itemsize: int, ring: int) -> tuple[int, int]:
    """Bytes of one request in all recurrent layers: its state, and what waits with `ring` rows in
    addition."""
    state = ring_bytes = 0
    for kind in recurrent_kinds(arch.layers):
        state += 4 * kind.numbers + itemsize * (kind.taps - 1) * kind.channels
        ring_bytes += ring * (itemsize * kind.channels + 4 * 2 * kind.value_heads)
    return state, ring_bytes


@dataclass(frozen=True, slots=True)
class PageShare:
    """A group of pages: what its layers store, and how much of it one request may hold."""

    window: int | None
    token: int  # bytes of one token in all its layers
    max_tokens: (
        int | None
    )  # tokens that one request holds, with all that rounds up to pages; None: all that it has


def page_shares(arch: ModelArch, sizes: TokenSizes, page_size: int, beyond: int) -> list[PageShare]:
    """`beyond`: tokens of a request that are held beside its window."""
    shares = []
    for window in page_groups(arch.layers):
        token = sum(sizes.token(kind) for kind in attention_kinds(arch.layers) if kind.kv_window == window)
        if window is None:
            token += sum(sizes.part_of_entry(kind) for kind in attention_kinds(arch.layers))
        max_tokens = None if window is None else (columns(window + beyond, page_size) + 1) * page_size
        shares.append(PageShare(window, token, max_tokens))
    return shares


@dataclass(frozen=True, slots=True)
class TokenSizes:
    """Bytes of one token in one layer."""

    kv_dtype: torch.dtype  # the type of keys and values
    itemsize: int  # bytes of a number that is not rounded

    def token(self, kind: Attention) -> int:
        return (
            kind.numbers * self.kv_dtype.itemsize + self.scale(kind.index_dim) + kind.inputs * self.itemsize
        )

    def entry(self, kind: Attention) -> int:
        """Bytes of an entry, which stands for several tokens."""
        return (
            0
            if kind.compressed is None
            else kind.entry * self.kv_dtype.itemsize + self.scale(kind.compressed.index_dim)
        )

    def scale(self, index_dim: int) -> int:
        """Bytes of an index key's scale."""
        return SCALE_BYTES if index_dim and self.kv_dtype == FP8 else 0

    def part_of_entry(self, kind: Attention) -> int:
        """Rounded up; 0: the layer has none."""
        return 0 if kind.compressed is None else columns(self.entry(kind), kind.compressed.every)


def columns(tokens: int, page_size: int) -> int:
    return -(-tokens // page_size)


def tokens_in(share: PageShare, tokens: int, requests: int) -> int:
    """Tokens that a group holds, out of `tokens` of so many requests."""
    return tokens if share.max_tokens is None else min(tokens, requests * share.max_tokens)


def largest(shares: list[PageShare], budget: int, requests: int, limit: int) -> int:
    """Tokens, at most `limit`, of which so many requests keep what they need within `budget` bytes."""
    growing, fixed = list(shares), 0
    while growing:
        tokens = min((budget - fixed) // sum(share.token for share in growing), limit)
        full = [
            share
            for share in growing
            if share.max_tokens is not None and requests * share.max_tokens < tokens
        ]
        if not full:
            return tokens
        # Their groups have all that they can use: what is left is for the others.
        fixed += sum(share.token * requests * (share.max_tokens or 0) for share in full)
        growing = [share for share in growing if share not in full]
    return limit


@dataclass(frozen=True, slots=True)
class WorkingMemory:
    """What running requests and their step take beside the pages. Sizes are in bytes."""

    config: EngineConfig
    arch: ModelArch
    device: torch.device
    itemsize: int
    sizes: TokenSizes
    boundary: int  # bytes of one hidden row
    context: int  # tokens
    state: Sizes  # what every seat has
    tables: Sizes  # what seats get once a request has a penalty, a bias or a grammar

    def rows(self, running: int) -> list[tuple[str, int]]:
        config, arch, scheduler = self.config, self.arch, self.config.scheduler
        state_bytes, waiting_bytes = state_sizes(arch, self.itemsize, config.spec.nodes)
        step = workspace(config, arch, self.itemsize, running) + selection(
            arch, scheduler.step_tokens, self.context
        )
        captured = step if self.device.type == "cuda" and not scheduler.disable_cuda_graph else 0
        absorbed = running * self.boundary * deferred_rows(config, arch)
        completed = (running + 1) * entries_of_nodes(config, arch, self.sizes)
        return [
            ("request state", self.state(running)),
            ("tables of penalties, biases and grammars, when requests use them", self.tables(running)),
            ("hidden states that wait for the draft model", absorbed),
            ("states of recurrent layers", (running + 1) * state_bytes),
            ("inputs of recurrent layers that wait for verification", (running + 1) * waiting_bytes),
            ("entries that tree nodes complete", completed),
            (f"one step's numbers{ESTIMATE}", step),
            (f"captured steps{ESTIMATE}", captured),
        ]


def memory_budget(config: EngineConfig, device: torch.device) -> int:
    """Bytes for weights and KV pool, and all that requests need."""
    default = GPU_FRACTION if device.type == "cuda" else CPU_FRACTION
    fraction = config.cache.mem_fraction_static or default
    return int(usable_memory(device, config.parallel.ranks) * fraction)


def plan_memory(
    config: EngineConfig, arch: ModelArch, kv_dtype: torch.dtype, device: torch.device, fixed: Fixed,
    lookahead: int, state: Sizes,
    tables: Sizes,
) -> MemoryPlan:  # fmt: skip
    """`kv_dtype`: what keys and values are stored in. `state` is what every seat has, `tables` what seats get
    once a request has a penalty, a bias or a grammar. Raises NoRoom where nothing is left for the pool."""
    spec, page_size, scheduler = config.spec, config.cache.page_size, config.scheduler
    context = arch.max_positions if config.model.context_length is None else config.model.context_length
    width = arch.features.boundary_width(arch.hidden, arch.residual // arch.hidden)
    boundary, sizes = width * fixed.itemsize, TokenSizes(kv_dtype, fixed.itemsize)
    shares = page_shares(arch, sizes, page_size, scheduler.step_tokens + lookahead)
    routed = token_bytes(config.sampling, arch)
    shares[0] = replace(shares[0], token=shares[0].token + columns(boundary, page_size) + routed)
    token, ahead = sum(share.token for share in shares), lookahead
    max_running = scheduler.most_running(spec.nodes + 1)
    weights, total = sum(size for _, size in fixed.rows), config.cache.max_total_tokens
    state_bytes, waiting_bytes = state_sizes(arch, fixed.itemsize, spec.nodes)

    working = WorkingMemory(config, arch, device, fixed.itemsize, sizes, boundary, context, state, tables)
    if total is None:
        budget = memory_budget(config, device) - weights
        typical = max(context // SHARE_OF_CONTEXT, 1)
        # Half of the states are kept ones, at least.
        request_bytes = (
            sum(share.token * tokens_in(share, typical, 1) for share in shares)
            + 2 * state_bytes
            + waiting_bytes
        )
        running = scheduler.max_running_requests or concurrency(
            max(budget, 0) * typical // request_bytes, context, max_running
        )
        budget -= sum(size for _, size in working.rows(running)) + page_size * token
        states = kept_states(config, state_bytes, running, budget)
        budget -= states * state_bytes
        total = largest(shares, budget, running, running * (context + ahead + page_size))
    else:
        running = scheduler.max_running_requests or concurrency(total, context, max_running)
        states = kept_states(config, state_bytes, running, None)
    pages, kinds = divided(shares, total, running, page_size), attention_kinds(arch.layers)
    if min(pages) < 1:
        needed_bytes = weights + sum(size for _, size in working.rows(running)) + 2 * page_size * token
        raise NoRoom(no_pages(config, device, weights, needed_bytes))
    rows = [
        *fixed.rows,
        *working.rows(running),
        *kv_rows(arch, sizes, page_size, pages, running, ahead),
        (
            "KV, padding page",
            sum(page_size * sizes.token(kind) + entries_of_page(kind, sizes, page_size) for kind in kinds),
        ),
        (f"{states} cached states of recurrent layers", states * state_bytes),
        ("hidden state at the end of each page", (pages[0] + 1) * boundary),
        ("experts of each token", (pages[0] + 1) * page_size * routed),
    ]
    return MemoryPlan([row for row in rows if row[1]], pages, states, running, context)


def require_memory(plan: MemoryPlan, config: EngineConfig, device: torch.device) -> None:
    """Before anything is allocated. Raises NoRoom."""
    there, sure = (
        usable_memory(device, config.parallel.ranks),
        [row for row in plan.rows if not row[0].endswith(ESTIMATE)],
    )
    required_bytes = sum(size for _, size in sure)
    if required_bytes <= there:
        return
    what, max_bytes = max(sure, key=lambda row: row[1])
    advice = (
        "lower --max-running-requests"
        if config.cache.max_total_tokens is None
        else "lower --max-total-tokens"
    )
    gib = 2**30
    raise NoRoom(
        f"{required_bytes / gib:,.1f} GiB of memory are needed ({what}: {max_bytes / gib:,.1f} GiB), "
        f"and {there / gib:,.1f} GiB are available: {advice}"
    )


def divided(shares: list[PageShare], total: int, running: int, page_size: int) -> tuple[int, ...]:
    """Pages of each group, for `total` tokens."""
    return tuple(tokens_in(share, total, running) // page_size for share in shares)


def no_pages(config: EngineConfig, device: torch.device, weights: int, needed_bytes: int) -> str:
    """Why the pool has not even one page of each kind. `needed_bytes`: with one, and all beside it."""
    tokens, page_size = config.cache.max_total_tokens, config.cache.page_size
    if tokens is not None:
        return f"--max-total-tokens must be at least --page-size, {page_size}, got {tokens}"
    mib, usable_bytes = 2**20, usable_memory(device, config.parallel.ranks)
    budget_bytes = memory_budget(config, device)
    enough = ceil(10_000 * needed_bytes / usable_bytes) / 10_000
    way_out = f"raise it to {enough:g}" if enough <= 1 else "the model does not fit on this machine"
    return (
        f"no memory is left for the KV cache: weights take {weights / mib:,.0f} MiB, and "
        f"--mem-fraction-static {budget_bytes / usable_bytes:.2g} of {usable_bytes / mib:,.0f} MiB is "
        f"{budget_bytes / mib:,.1f} MiB: {way_out}, or set --max-total-tokens"
    )


def deferred_rows(config: EngineConfig, arch: ModelArch) -> int:
    """Deferred rows of each request. Layers with a window defer none, nor do chained ones: see
    engine/startup/assemble."""
    every = page_groups(arch.layers) == (None,) and not arch.features.chained
    return spec_sizes(config.spec, config.scheduler.step_tokens).max_deferred_tokens if every else 0


def entries_of_nodes(config: EngineConfig, arch: ModelArch, sizes: TokenSizes) -> int:
    """Bytes of one request."""
    nodes = spec_sizes(config.spec, config.scheduler.step_tokens).nodes
    return nodes * sum(map(sizes.entry, attention_kinds(arch.layers)))


def kept_states(config: EngineConfig, size: int, running: int, budget: int | None) -> int:
    """States of `size` bytes that are kept besides those of requests. `budget`: of the pool, in bytes."""
    if not size or config.cache.disable_radix_cache:
        return 0
    return max(
        1,
        min(
            STATES_EACH * running, STATES_EACH * running if budget is None else budget // STATES_PART // size
        ),
    )


def entries_of_page(kind: Attention, sizes: TokenSizes, page_size: int) -> int:
    """Bytes of a page's entries in one layer."""
    return 0 if kind.compressed is None else page_size // kind.compressed.every * sizes.entry(kind)


def kv_rows(
    arch: ModelArch, sizes: TokenSizes, page_size: int, pages: tuple[int, ...], running: int, ahead: int
) -> list[tuple[str, int]]:
    """By store. What is kept ahead of the requests' tokens has a row of its own where layers keep all tokens;
    windows and entries count it in."""
    rows, all_ahead = [], 0
    windows = page_groups(arch.layers)
    for kind in dict.fromkeys(attention_kinds(arch.layers)):
        tokens, layers = pages[windows.index(kind.kv_window)] * page_size, arch.layers.count(kind)
        size = layers * sizes.token(kind)
        num_lookahead_tokens = min(running * ahead, tokens) if kind.window is None else 0
        rows.append(
            (
                f"KV, {tokens - num_lookahead_tokens:,} tokens in {layers} layers ({kind})",
                (tokens - num_lookahead_tokens) * size,
            )
        )
        if kind.compressed is not None:
            entries = pages[0] * page_size // kind.compressed.every
            rows.append(
                (
                    f"KV, {entries:,} entries in {layers} layers ({kind.entries})",
                    layers * pages[0] * entries_of_page(kind, sizes, page_size),
                )
            )
        all_ahead += num_lookahead_tokens * size
    return [*rows, (f"KV, kept ahead: {running} requests x {ahead} tokens", all_ahead)]


def concurrency(tokens: int, context: int, max_running: int) -> int:
    return max(1, min(max_running, tokens * SHARE_OF_CONTEXT // context))


def workspace(config: EngineConfig, arch: ModelArch, itemsize: int, running: int) -> int:
    """The widest layer's numbers, of a step that fills its budget, and the logits in float32 with three
    copies on their way to tokens."""
    rows = config.scheduler.step_tokens
    inner = (
        arch.intermediate
        if arch.moe is None
        else max(arch.intermediate, arch.moe.size * arch.moe.top_k + arch.moe.shared)
    )
    layer = (
        4 * arch.residual
        + 3 * inner
        + 2 * max(arch.heads_of(kind) * kind.kv.key_dim for kind in attention_kinds(arch.layers))
    )
    layer = max(
        layer, 4 * arch.hidden + max((3 * kind.channels for kind in recurrent_kinds(arch.layers)), default=0)
    )
    sampled = min(rows, running * (config.spec.nodes + 1))
    return rows * layer * itemsize + sampled * arch.vocab * 4 * 4


def selection(arch: ModelArch, rows: int, context: int) -> int:
    """Bytes for layers that attend to selected tokens: the slots for each row of a step, and the scores of as
    many rows as fit."""
    kinds = attention_kinds(arch.layers)
    selectors = [kind.selected for kind in kinds] + [
        kind.compressed.selected for kind in kinds if kind.compressed is not None
    ]
    best = max((selector.best for selector in selectors if selector is not None), default=0)
    return rows * best * 8 + min(rows * context, max(MAX_SCORES, context)) * 4 if best else 0


def usable_memory(device: torch.device, ranks: int = 1) -> int:
    """Bytes, of which `--mem-fraction-static` is a share. On a GPU what is free now, before weights are
    loaded: other processes keep what they have. On a CPU all that the machine has, since what counts as free
    there changes with every file that is read; `ranks` of a model share it."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks
