"""Compiles every configuration of every kernel that we ship, for every chip, without a GPU; `make check` runs it.

    python -m tests.kernels.matrix [--all] [--targets sm_90 …] [--groups seats …]

The wrappers are called with tensors on the CPU while launching is replaced by writing down what would be launched, so that what is
compiled is what ships: they are called with every number of rows, so that every tile which they choose is compiled. A kernel must not
spill registers where the compiler says how many it spilled, its shared memory must fit, and no float32 may be rounded to TF32.
With programmatic dependent launch it must wait before it writes.

Without --all attention, selection, states, seats and verdicts are covered pair by pair (tests/selection.py): each two values of a kernel's
types, constants and options occur together, and each value for each chip. Of the others each value occurs once. Light kernels, which have
few registers, are compiled for one chip and experts for two. After a change of a kernel: its group with --all; before a release: --all.

What the compiler said is kept in build/matrix (compiled.py), so that a second run compiles only what has changed.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import chain, islice, product
from multiprocessing import get_context
from typing import Any, TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.kernels.compiled import TARGETS, Facts, Launch, Source, Store, compiled
from tests.selection import covering

FLOAT8 = ("sm_90", "sm_100", "gfx942")  # have e4m3
DEPENDENT = ("sm_90", "sm_100")  # have programmatic dependent launch
SHARED = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10}
DEFAULT_TARGETS = {
    **dict.fromkeys(("selection", "around", "products", "rows", "verdicts", "seats", "table"), ("sm_90",)),
    **dict.fromkeys(("mixtures", "grouped mixtures"), ("sm_90", "gfx942")),
}
STRENGTH = dict.fromkeys(("attention", "selection", "verdicts", "states", "seats"), 2)  # of the others: each value once
SPILLS = {"*fp32": 64}  # bytes, by the type of q or x: float32 is for comparing, and a few do not matter
T = TypeVar("T")


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64)


@cache
def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def spans(
    heads: int, kv_heads: int, dim: int, width: int, dtype: torch.dtype, tree: bool, splits: int, page: int, latent: bool = False,
    stored: torch.dtype | None = None, window: int = 0, shift: int = 0, sinks: bool = False, requests: int = 2,
) -> None:  # fmt: skip
    """`stored`: what the cache holds, where it is not `dtype`."""
    from mtpserve_kernels.attention.span import span_gqa, span_mla

    rows = requests * width
    q, cached = zeros(rows, heads, dim, dtype=dtype), zeros(page, kv_heads, dim, dtype=stored or dtype)
    where = (zeros(4, 16), zeros(requests), zeros(requests + 1), zeros(requests), zeros(rows), zeros(rows) if tree else None,
             zeros(requests) if tree else None, page, 0.1)  # fmt: skip
    options = {"window": window, "shift": shift, "width": width, "splits": splits, "sinks": torch.zeros(heads) if sinks else None}
    if latent:
        span_mla(q, cached, *where, 512, **options)
    else:
        span_gqa(q, cached, cached, *where, **options)


def attention(target: str) -> None:
    from mtpserve_kernels.attention.span import FEW

    fp8, bf16, e4m3 = target in FLOAT8, torch.bfloat16, torch.float8_e4m3fn
    spans(32, 8, 128, 1, bf16, False, 8, 64)
    spans(32, 8, 128, 4, bf16, False, 8, 16)
    spans(32, 8, 128, 4, bf16, False, 1, 64, window=4096)
    spans(32, 8, 128, 1, bf16, False, 8, 64, shift=1)
    spans(32, 8, 128, 32, torch.float16, True, 1, 64)
    spans(16, 1, 64, 8, bf16, True, 4, 128)
    spans(64, 8, 64, 1, bf16, False, 8, 64, window=128, sinks=True)
    spans(64, 8, 64, 4, bf16, True, 1, 64, sinks=True)
    spans(32, 4, 512, 1, bf16, False, 8, 64)
    spans(32, 4, 512, 4, bf16, True, 1, 16, shift=1)
    spans(16, 1, 576, 1, bf16, False, 8, 64, latent=True)
    spans(16, 1, 576, 1, bf16, False, 1, 64, latent=True, shift=1)
    # Every tile that is ever chosen, with everything that costs registers: launches that are alike are compiled once.
    for dtype, stored in ((bf16, bf16), (torch.float32, torch.float32), (bf16, e4m3), (torch.float32, e4m3)):
        if stored == e4m3 and not fp8:
            continue
        for requests, width in product((2, FEW), range(1, 130)):
            for tree, window in ((True, 1000), (True, 0), (False, 0)):
                for dim in (128, 256, 512, 576):
                    more: dict[str, Any] = {"window": window, "shift": int(window > 0), "requests": requests}
                    spans(1, 1, dim, width, dtype, tree, 8, 64, latent=dim == 576, stored=stored, **more)


def selection(target: str) -> None:
    from mtpserve_kernels.attention.entries import window_and_entries
    from mtpserve_kernels.attention.select import select, selected_mla

    fp8 = target in FLOAT8
    for dtype, stored in ((torch.bfloat16, None), (torch.float32, None), (torch.bfloat16, torch.float8_e4m3fn if fp8 else None)):
        for heads, tree, shift in ((64, False, 0), (64, True, 1), (32, True, 0)):
            q, keys = torch.zeros(2, heads, 128, dtype=dtype), torch.zeros(64, 1, 128, dtype=stored or dtype)
            bits = ints(2) if tree else None
            scales = torch.zeros(64, 1, 1) if keys.dtype == torch.float8_e4m3fn else None
            select(q, torch.zeros(2, heads), keys, ints(4, 4096), ints(2), ints(2), bits, bits, 64, 2048, scales=scales, shift=shift)
        latent = torch.zeros(64, 1, 512, dtype=stored or dtype)
        tables, rows, sinks = (ints(4, 4096), latent), ints(2, 2), torch.zeros(64)
        for page, tree in ((64, None), (1, None), (1, ints(2))):
            window_and_entries(
                torch.zeros(2, 64, 512, dtype=dtype), latent, *tables, ints(4, 4096), rows, ints(2), tree, tree, ints(2), tree, tree, sinks,
                128, page, 128, 0.1,
            )  # fmt: skip
        latent = torch.zeros(64, 1, 576, dtype=stored or dtype)
        for heads in (1, 16, 64, 128):
            for splits in (1, 8):
                selected_mla(torch.zeros(2, heads, 576, dtype=dtype), latent, ints(2, 2048), ints(2), 0.1, 512, splits=splits)


def around(target: str) -> None:
    from mtpserve_kernels.cache.compact import compact
    from mtpserve_kernels.cache.slots import slots, store_boundary
    from mtpserve_kernels.fused.linear import skinny_gated, skinny_linear
    from mtpserve_kernels.quant.linear_fp8 import linear_fp8
    from mtpserve_kernels.quant.rows import linear_rows, widen_rows

    fp8, bf16 = target in FLOAT8, torch.bfloat16
    compact(torch.zeros(2, 64, 8, 128, dtype=bf16), ints(2, 7), ints(2, 7))
    slots(ints(4, 16), ints(4), ints(4), 16)
    for dtype in (bf16, torch.float32):
        store_boundary(torch.zeros(4, 7168, dtype=dtype), ints(4), torch.zeros(4, 7168, dtype=dtype), 16)
    for dtype in (bf16, torch.float32):
        weight = torch.zeros(512, 4096, dtype=dtype)
        for rows in range(1, 65):
            skinny_linear(weight[:rows], weight, None, splits=1)
        skinny_linear(weight[:4], weight, weight[0, :512], splits=4)
        skinny_gated(weight[:4], weight, weight[0, :512])
        if fp8:
            for rows in (*range(1, 65), 100, 200):
                linear_fp8(weight[:rows], weight.to(torch.float8_e4m3fn), torch.zeros(4, 32))
        for stored in by_row((512, 4096), fp8):
            for rows in range(1, 65):
                linear_rows(weight[:rows], *stored, splits=1)
            linear_rows(weight[:4], *stored, weight[0, :512], splits=4)
            widen_rows(*stored, dtype)


def rows(target: str) -> None:
    from tests.kernels.matrix_rows import launch

    launch(target in FLOAT8)


def by_row(shape: tuple[int, ...], fp8: bool) -> Iterator[tuple[torch.Tensor | None, ...]]:
    """Weights [..., N, K] with scales of each row: one or many, in every form."""
    one, narrow, wide = ((*shape[:-1], groups) for groups in (1, shape[-1] // 32, shape[-1] // 128))
    if fp8:
        yield torch.zeros(shape, dtype=torch.float8_e4m3fn), torch.zeros(one), None, None
    halves = torch.zeros((*shape[:-1], shape[-1] // 2), dtype=torch.uint8)
    yield halves, torch.zeros(narrow, dtype=torch.bfloat16), None, None
    yield halves, torch.zeros(wide, dtype=torch.float16), torch.zeros(wide, dtype=torch.uint8), None
    yield halves, torch.zeros(narrow, dtype=torch.float8_e8m0fnu), None, None
    yield halves, torch.zeros((*shape[:-1], shape[-1] // 16), dtype=torch.float8_e4m3fn), None, torch.zeros(one)


def mixtures(target: str) -> None:
    from tests.kernels.mixtures import few_rows, routers

    routers()
    few_rows(target in FLOAT8, by_row)


def grouped_mixtures(target: str) -> None:
    from tests.kernels.mixtures import grouped_rows

    grouped_rows(target in FLOAT8, by_row)


def verdicts(target: str) -> None:
    from tests.kernels.verdict_rows import launch

    launch()


def states(target: str) -> None:
    from mtpserve_kernels.recurrent.delta import recur
    from mtpserve_kernels.recurrent.reference import LayerState, Rule, StateSpans

    for dtype, rule in product((torch.bfloat16, torch.float32), (Rule(16, 32, 128, 128, 4), Rule(8, 32, 128, 64, 4, True))):
        conv, skip = torch.zeros(4 + rule.mamba2, rule.channels), torch.zeros(32) if rule.mamba2 else None
        # Decoding, the widest tree, and chunks of prompts of which a state is kept.
        for rows, drafts, tree, keeps in ((1, 3, False, False), (1, 63, True, False), (200, 3, False, True)):
            x, gates = torch.zeros(2 * rows, rule.channels, dtype=dtype), torch.zeros(2 * rows, 2, rule.value_heads)
            before, ring = x.new_zeros(3, 3, rule.channels), x.new_zeros(2, drafts, rule.channels)
            layer = LayerState(torch.zeros(3, 32, 128, rule.value_dim), before, ring, torch.zeros(2, drafts, 2, 32))
            kept = (ints(2), ints(2)) if keeps else (None, None)
            spans = StateSpans(ints(2), ints(3), ints(2), ints(2), ints(2), ints(2, drafts) if tree else None, *kept, drafts, rows)
            recur(x, gates, conv, layer, spans, rule, skip)


def seats(target: str) -> None:
    """A step's own kernels: they have one form for all numbers of requests and rows."""
    from mtpserve_kernels.requests import reference, step

    records = reference.RequestTable(ints(4, 4128), ints(5, 4), ints(4, 32), torch.zeros(4, dtype=torch.bool), ints(4, 65), 64)
    requests, failed = ints(2), torch.zeros(2, dtype=torch.bool)
    for start in (None, requests):
        step.place(records, requests, ints(8), ints(8), ints(3), requests, requests, start=start)
    step.following(records, ints(8), ints(8))
    step.draft_positions(ints(4), records.block_table, requests, 2, 3, 64)
    for drafts in (0, 1, 3, 7, 63):
        step.advance(records, requests, ints(3), requests, requests, requests, ints(2, drafts + 1))
        step.hold(records, requests, ints(2, drafts), requests)
        step.result_table(requests, ints(8), ints(2, drafts + 1), ints(4, drafts), requests, requests, failed, ints(2, drafts + 1))
    step.hold(records, requests, ints(2, 3), requests, (torch.zeros(2, 3, 32000), torch.zeros(4, 3, 32000)))
    for nodes, depth in ((7, 3), (63, 8)):
        verdict = ints(4, nodes), requests, requests, failed, ints(2, depth + 1), ints(2, nodes), ints(2, depth + 1)
        step.result_table(requests, ints(8), ints(2, nodes + 1), *verdict)


def table(target: str) -> None:
    from tests.kernels.table_entries import entries_of, launch

    for entry in entries_of(target):
        launch(entry)


def products(target: str) -> None:
    from tests.kernels.products import product_launches

    product_launches()


GROUPS = {
    "attention": attention,
    "selection": selection,
    "around": around,
    "products": products,
    "rows": rows,
    "mixtures": mixtures,
    "grouped mixtures": grouped_mixtures,
    "verdicts": verdicts,
    "states": states,
    "seats": seats,
    "table": table,
}


@contextmanager
def writing_down(hip: bool, seen: Callable[[Launch], T]) -> Iterator[list[T]]:
    """What `seen` gives for each launch."""
    from triton.runtime.jit import JITFunction

    launches: list[T] = []
    run, version = JITFunction.run, torch.version.hip

    def write(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launches.append(seen((self, args, kwargs)))

    JITFunction.run, torch.version.hip = write, "6" if hip else None
    try:
        yield launches
    finally:
        JITFunction.run, torch.version.hip = run, version


@cache
def fake() -> FakeTensorMode:
    """Tensors on the CPU without memory: those of all groups would be filled with gigabytes of zeros, over and over."""
    return FakeTensorMode()


def launched(target: str, group: str) -> list[Source]:
    """What is launched on `target`, each configuration once, the largest tiles first: they are what does not fit."""
    from mtpserve_kernels import dependent_launch
    from mtpserve_kernels.attention import span

    with fake(), writing_down(TARGETS[target][0] == "hip", Source.of) as sources:
        span.shared_memory_of = lambda device: SHARED[target]
        dependent_launch.enabled = lambda device: target in DEPENDENT
        GROUPS[group](target)
    configurations: dict[tuple[str, str, str], Source] = {}
    for source in sources:
        configurations.setdefault((source.name, str(source.signature), str(source.options)), source)
    return sorted(configurations.values(), key=lambda source: -source.tile)


def covered(group: str, targets: Sequence[str], strength: int | None) -> list[tuple[str, Source]]:
    """Of all configurations of a group those in which each combination of `strength` values of a kernel occurs; None: all. Values are its
    types, constants and options, and the chip."""
    kernels: dict[str, list[tuple[str, Source]]] = {}
    for target in targets:
        for source in launched(target, group):
            kernels.setdefault(source.kernel.__name__, []).append((target, source))
    if strength is None:
        return list(chain.from_iterable(kernels.values()))
    chosen = []
    for cases in kernels.values():
        values = [(("", target), *source.values) for target, source in cases]
        chosen += [cases[i] for i in covering(values, strength)]
    return chosen


def errors(source: Source, facts: Facts, target: str) -> Iterator[str]:
    if facts.shared > SHARED[target]:
        yield f"needs {facts.shared} bytes of shared memory, there are {SHARED[target]}"
    if (facts.spilled or 0) > SPILLS.get(source.signature.get("p_q", source.signature.get("p_x", "")), 0):
        yield f"spills {facts.spilled}"
    if facts.has_tf32:
        yield "rounds float32 to tf32"
    is_span_of_halves = source.kernel.__name__ == "span_kernel" and source.signature["p_k"] == source.signature["p_q"] != "*fp32"
    if is_span_of_halves and TARGETS[target][0] == "cuda" and not facts.has_async_copy:
        yield "does not copy ahead: the loop is not pipelined"
    if source.constant("launch_pdl") and not facts.waits_before_stores:
        yield "does not wait for the launch before it"


@dataclass
class Checked:
    facts: dict[str, Facts]
    wrong: list[str]
    compiled: int  # the others' facts were kept


def check(group: str, targets: Sequence[str], strength: int | None, part: int, parts: int) -> Checked:
    """Every `parts`th configuration from `part` on: a process for each core, of which none waits for another's group."""
    kept, checked = Store(group).load(), Checked({}, [], 0)
    for target, source in covered(group, targets, strength)[part::parts]:
        digest = source.digest(target)
        facts = kept.get(digest)
        if facts is None:
            checked.compiled += 1
            try:
                facts = compiled(source, target)
            except Exception as error:
                checked.wrong.append(f"{target}: {source.name}: {type(error).__name__}: {' '.join(str(error).split())[-300:]}")
                continue
        checked.facts[digest] = facts
        checked.wrong += [f"{target}: {source.name} {error}" for error in errors(source, facts, target)]
    return checked


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="compile every configuration for the targets, by default for all of them")
    parser.add_argument("--targets", nargs="+", choices=list(TARGETS), help="default: see DEFAULT_TARGETS")
    parser.add_argument("--groups", nargs="+", choices=list(GROUPS), default=list(GROUPS))
    options = parser.parse_args()
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    wrong, parts = 0, min(os.cpu_count() or 1, 8)
    work = []
    for group in options.groups:
        targets = options.targets or list(TARGETS if options.all else DEFAULT_TARGETS.get(group, TARGETS))
        strength = None if options.all else STRENGTH.get(group, 1)
        work += [(group, targets, strength, part, parts) for part in range(parts)]
    with ProcessPoolExecutor(parts, mp_context=get_context("spawn")) as pool:
        results = pool.map(check, *zip(*work, strict=True))
        for group, targets, *_ in work[::parts]:
            mine = list(islice(results, parts))
            facts = {digest: fact for checked in mine for digest, fact in checked.facts.items()}
            lines = [line for checked in mine for line in checked.wrong]
            Store(group).save(facts)
            fresh = sum(checked.compiled for checked in mine)
            print(f"{group}, {' '.join(targets)}: {len(facts)} configurations, {fresh} compiled", *lines, sep="\n", flush=True)
            wrong += len(lines)
    print(f"{wrong} wrong" if wrong else "all compile, none spills")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
