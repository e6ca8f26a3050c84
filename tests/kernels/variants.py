"""How many variants of each kernel are compiled when only the counts of a step change; needs no GPU.

    python -m tests.kernels.variants

Triton compiles a kernel again for an integer that is 1 or a multiple of 16, and for every other value of a constant. The wrappers are
called with several numbers of requests and rows, launching is replaced by writing down, and Triton's own code says which variant each
launch would take. Tiles, and so constants, may follow from a count: variants are counted for each set of constants. Prints one JSON
object: kernel and constants → number of variants.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict

import torch

from tests.kernels.matrix import Launch, ints, writing_down

COUNTS = (1, 2, 15, 16, 17, 31, 32, 48)


def step(count: int) -> None:
    """Every kernel, for `count` requests or rows."""
    from mtpserve_kernels import tuned
    from mtpserve_kernels.attention.entries import window_and_entries
    from mtpserve_kernels.attention.select import select, selected_mla
    from mtpserve_kernels.attention.span import span_gqa, span_mla
    from mtpserve_kernels.cache.compact import compact
    from mtpserve_kernels.cache.slots import slots, store_boundary
    from mtpserve_kernels.fused.linear import skinny_linear
    from mtpserve_kernels.fused.norm import add_rms_norm
    from mtpserve_kernels.fused.rope import latent_store, rope_store
    from mtpserve_kernels.fused.silu import silu_mul
    from mtpserve_kernels.lora.grouped import add_lora
    from mtpserve_kernels.lora.reference import RowAdapters
    from mtpserve_kernels.moe.experts import experts
    from mtpserve_kernels.moe.experts_rows import experts_rows
    from mtpserve_kernels.moe.route import route
    from mtpserve_kernels.quant.linear_fp8 import linear_fp8
    from mtpserve_kernels.quant.rows import linear_rows, widen_rows
    from mtpserve_kernels.recurrent.delta import recur
    from mtpserve_kernels.recurrent.reference import LayerState, Rule, StateSpans
    from mtpserve_kernels.requests import reference, step as seats
    from mtpserve_kernels.spec.accept import accept
    from mtpserve_kernels.spec.argmax import argmax
    from mtpserve_kernels.spec.draw import draw

    where = ints(50, 16), ints(count), ints(count + 1), ints(count), ints(count), None, None, 16, 0.1
    for splits in (1, 4, 64):  # the parts of 64 are added by a kernel of its own
        cache = torch.zeros(64, 2, 128)
        span_gqa(torch.zeros(count, 8, 128), cache, cache.clone(), *where, splits=splits)
        span_mla(torch.zeros(count, 8, 576), torch.zeros(64, 1, 576), *where, 512, splits=splits)
    rows = ints(count), ints(count), None, None
    for scores in (64 * count, 1 << 26):
        chosen = select(
            torch.zeros(count, 4, 32), torch.zeros(count, 4), torch.zeros(64, 1, 32), ints(50, 16), *rows, 16, 20, scores=scores
        )
    selected_mla(torch.zeros(count, 8, 576), torch.zeros(64, 1, 576), *chosen, 0.1, 512, splits=1)
    latent, tables = torch.zeros(64, 1, 512), (ints(50, 16), torch.zeros(64, 1, 512), ints(50, 16), ints(2, count))
    window_and_entries(
        torch.zeros(count, 8, 512), latent, *tables, ints(count), None, None, ints(count), None, None, torch.zeros(8), 16, 4, 128, 0.1,
        splits=1,
    )  # fmt: skip
    x, cos = torch.zeros(count, 256), torch.zeros(64, 64)
    add_rms_norm(x, x, x[0], 1e-6)
    silu_mul(x)
    add_lora(x, torch.zeros(count, 192), RowAdapters(ints(count), ints(count)), x.new_zeros(4, 48, 256), x.new_zeros(4, 16, 192), (64,) * 3)
    rope_store(x.new_zeros(count, 12, 128), ints(count), cos, cos, ints(count), cache, cache, 8)
    latent, norm = x.new_zeros(64, 1, 640), x.new_zeros(512)
    latent_store(x.new_zeros(count, 8, 192), x.new_zeros(count, 640), ints(count), cos, cos, ints(count), latent, norm, 1e-6, 64)
    compact(torch.zeros(2, 64, 2, 128), ints(count, count), ints(count, count))
    slots(ints(50, 16), ints(count), ints(count), 16)
    store_boundary(torch.zeros(4, 256), ints(count), torch.zeros(count, 256), 16)
    for splits in (1, 2):
        skinny_linear(x, torch.zeros(512, 256), splits=splits)
        with tuned.override("skinny_linear", {"BN": 8, "BK": 256, "BT": 1, "warps": 1, "stages": 3}):
            skinny_linear(x[:1], torch.zeros(512, 256), splits=splits)
    linear_fp8(x.new_zeros(64 + count, 256), torch.zeros(512, 256).to(torch.float8_e4m3fn), torch.zeros(4, 2))
    route(x, torch.zeros(16, 256), torch.zeros(16), 2, 1, 1, True, 1.0)
    for first in (None, 4):
        for rows_in in (count, 64 + count):  # more are grouped by expert
            routed = torch.zeros(rows_in, 256), torch.zeros(rows_in, 2), ints(rows_in, 2)
            experts(*routed, torch.zeros(4, 256, 256), torch.zeros(4, 256, 128), None, None, first=first)
    halves, scale = torch.zeros(4, 256, 128, dtype=torch.uint8), torch.zeros(4, 256, 2)
    for splits in (1, 2):
        linear_rows(x, halves[0], scale[0], None, splits=splits)
    widen_rows(halves[0], scale[0], None, None, x.dtype)
    down = torch.zeros(4, 256, 64, dtype=torch.uint8), scale, None, None
    experts_rows(x, torch.zeros(count, 2), ints(count, 2), halves, scale, None, None, *down)
    rule = Rule(2, 4, 16, 16, 4)
    layer = LayerState(
        torch.zeros(50, 4, 16, 16), torch.zeros(50, 3, rule.channels), torch.zeros(50, 7, rule.channels), torch.zeros(50, 7, 2, 4)
    )
    own = ints(count), ints(count + 1), ints(count), ints(count), ints(count)
    for parents in (None, ints(count, 7)):
        spans = StateSpans(*own, parents, None, None, 7, count)
        recur(torch.zeros(count, rule.channels), torch.zeros(count, 2, 4), torch.zeros(4, rule.channels), layer, spans, rule)
    requests, rows_of = ints(count), ints(3 * count)
    records = reference.RequestTable(ints(50, 300), ints(5, 50), ints(50, 32), torch.zeros(50, dtype=torch.bool), ints(50, 16), 16)
    for start in (None, requests):
        seats.place(records, requests, rows_of, rows_of, ints(count + 1), requests, requests, start=start)
    seats.following(records, rows_of, rows_of)
    seats.draft_positions(ints(50), records.block_table, requests, 2, 3, 16)
    seats.advance(records, requests, ints(count + 1), requests, requests, requests, ints(count, 4))
    for probs in (None, (torch.zeros(count, 3, 1000), torch.zeros(50, 3, 1000))):
        seats.hold(records, requests, ints(count, 3), requests, probs)
    table = requests, rows_of, ints(count, 4), ints(50, 3), requests, requests, requests.bool(), ints(count, 4)
    for nodes in ((), (ints(count, 3), ints(count, 4))):
        seats.result_table(*table, *nodes)
    sampling = torch.zeros(50), ints(50), torch.zeros(50), torch.zeros(50), ints(50), torch.zeros(50, dtype=torch.bool)
    for q in (None, torch.zeros(50, 3, 9000)):
        step_rows = ints(4 * count), ints(count), None, None, ints(count), ints(50)
        for all_greedy in (False, True):
            verdict = torch.zeros(count, 4, 9000), *step_rows, *sampling, q, 3
            accept(*verdict, sample_rows=ints(count, 4), all_greedy=all_greedy)
    argmax(torch.zeros(count, 9000))
    draw(torch.zeros(count, 9000), ints(count), ints(count), *sampling, torch.zeros(count, 9000))


def variant(launch: Launch) -> tuple[str, str]:
    """→ kernel and constants, and everything by which Triton would find the compiled kernel again."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    kernel, args, kwargs = launch
    binder = create_function_from_signature(kernel.signature, kernel.params, make_backend(GPUTarget("cuda", 90, 32)))
    bound, specialisation, options = binder(*args, **kwargs)
    constants = {parameter.name: bound[parameter.name] for parameter in kernel.params if parameter.is_constexpr}
    absent = [name for name, value in bound.items() if value is None]
    return f"{kernel.__name__} {constants} without {absent}", f"{specialisation} {options}"


def main() -> None:
    os.environ.pop("TRITON_INTERPRET", None)
    variants: defaultdict[str, set[str]] = defaultdict(set)
    with writing_down(False, variant) as found:
        for count in COUNTS:
            step(count)
    for kernel, key in found:
        variants[kernel].add(key)
    print(json.dumps({kernel: len(keys) for kernel, keys in variants.items()}, indent=1))


if __name__ == "__main__":
    main()
