"""Acceptance, chain or tree: every node's choice, then the walk along the choices that were drafted.

    argmax_kernel   a program per chunk of a row     the chunk's largest logit; with a temperature the sum of its exponentials
    cut_kernel      a program per row                where some request has a top_k, top_p or min_p
    race_kernel     a program per chunk of a row     where some request has a temperature
    walk_kernel     a program per request            compares what the chunks of its nodes have, and follows the choices from the root

So greedy requests take two launches that read their logits once, and others three or four. A greedy row costs the later ones nothing.

Moves T V numbers from memory once, and T V and as much of q for a race.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpserve_kernels.spec.argmax import LEAST_KEY, WARPS, Chunks, chunks, chunks_of, is_finite, place_of
from mtpserve_kernels.spec.race import NO_SPEED, PARTS, race_kernel, row_cuts

KEYS_PER_WARP = 256  # of a walk


@triton.jit
def _race_winner(p_part, o_node, o_chunk, m, CHUNKS: tl.constexpr):
    """→ of each node the bits of the largest speed, and the first token that has it."""
    o = o_node[:, None] * PARTS * CHUNKS + o_chunk[None, :]
    b_speed, b_token = tl.load(p_part + o, mask=m, other=NO_SPEED), tl.load(p_part + CHUNKS + o, mask=m, other=0)
    b_best = tl.max(b_speed, 1)
    return b_best, tl.min(tl.where(b_speed == b_best[:, None], b_token, 0x7FFFFFFF), 1)


@triton.jit
def _at(b_values, o, node):
    """The value of one node."""
    return tl.sum(tl.where(o == node, b_values, 0))


@triton.jit(do_not_specialize=["p_drafts", "p_rows", "p_count", "p_parents", "p_req_indices", "stride_parents"])
def walk_kernel(
    p_drafts, p_rows, p_count, p_parents, p_req_indices, p_temperature, p_coupled, p_keys, p_winners, p_coins,
    p_tokens, p_accepted, p_path, p_failed, stride_parents, NODES: tl.constexpr, DEPTH: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """p_parents is None for chains, p_winners where all are greedy, p_coins where no drafts were drawn."""
    r = tl.program_id(0).to(tl.int64)
    req_idx = tl.load(p_req_indices + r)
    o, o_chunk = tl.arange(0, triton.next_power_of_2(NODES)), tl.arange(0, triton.next_power_of_2(CHUNKS))
    count = tl.minimum(tl.load(p_count + r), NODES - 1)
    m, m_node, m_key = o < count, o < NODES, (o < NODES)[:, None] & (o_chunk < CHUNKS)[None, :]
    if p_rows is not None:
        b_draft = tl.load(p_drafts + tl.load(p_rows + r * NODES + 1 + o, mask=m, other=0), mask=m, other=-1)
    else:
        b_draft = tl.load(p_drafts + r * (NODES - 1) + o, mask=m, other=-1)
    b_parent = o.to(tl.int64)
    if p_parents is not None:
        b_parent = tl.load(p_parents + r * stride_parents + o, mask=m, other=-1)
    p_row_keys = p_keys + r * NODES * CHUNKS
    b_key = tl.max(tl.load(p_row_keys + o[:, None] * CHUNKS + o_chunk[None, :], mask=m_key, other=LEAST_KEY), 1)
    b_fine, b_choice = is_finite(b_key).to(tl.int32), place_of(b_key)
    b_coin, b_rest, has_q = tl.zeros_like(b_fine), b_choice, tl.full([], 0, tl.int32)
    if p_winners is not None:
        if tl.load(p_temperature + req_idx) > 0:
            p_part = p_winners + r * NODES * PARTS * CHUNKS
            _, b_choice = _race_winner(p_part, o, o_chunk, m_key, CHUNKS)
            if p_coins is not None:
                has_q = tl.where(tl.load(p_coupled + req_idx) == 0, 1, 0)
                b_coin = tl.load(p_coins + r * NODES + o, mask=m_node, other=0)
                b_best, b_rest = _race_winner(p_part + 2 * CHUNKS, o, o_chunk, m_key, CHUNKS)
                # p = q up to rounding leaves nothing over; then the rejection was rounding too, and p itself is the law.
                b_rest = tl.where(b_best > 0, b_rest, b_choice)
    node, accepted = tl.full([], 0, tl.int64), tl.full([], 0, tl.int64)
    going, failed = tl.full([], 1, tl.int32), tl.full([], 0, tl.int32)
    for at in range(DEPTH + 1):
        fine, choice = _at(b_fine, o, node), _at(b_choice, o, node)
        child = tl.max(tl.where(m & (b_parent == node) & (b_draft == choice), o + 1, 0))
        if p_coins is not None:
            has_draft = (node < count) & (at < DEPTH)
            is_kept = has_draft & (_at(b_coin, o, node) > 0)
            rest = tl.where(has_draft, _at(b_rest, o, node), choice)
            child = tl.where(has_q > 0, tl.where(is_kept, node.to(tl.int32) + 1, 0), child)
            choice = tl.where(has_q > 0, tl.where(is_kept, _at(b_draft, o, node), rest), choice)
        if at == DEPTH:
            child = child * 0
        failed = tl.where((going > 0) & (fine == 0), 1, failed)
        # After the end all is void, but a path repeats its last node.
        tl.store(p_tokens + r * (DEPTH + 1) + at, choice)
        tl.store(p_path + r * (DEPTH + 1) + at, node)
        going = tl.where((child > 0) & (fine > 0), going, 0)
        accepted = accepted + going
        node = tl.where(going > 0, child.to(tl.int64), node)
    tl.store(p_accepted + r, accepted)
    tl.store(p_failed + r, failed > 0)


def accept(
    logits: Tensor, drafts: Tensor, num_draft_tokens: Tensor, parents: Tensor | None, depths: Tensor | None, seats: Tensor, length: Tensor,
    temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, seed: Tensor, coupled: Tensor, draft_probs: Tensor | None,
    depth: int, *, sample_rows: Tensor | None = None, all_greedy: bool = False, any_top_k: bool = True, any_top_p: bool = True,
    any_min_p: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """logits [R, K+1, V] float32, drafts [R, K], draft_count [R], parents [R, K] and depths [R, K+1] of a tree or None for chains,
    seats [R]: int64. With sample_rows [R, K+1] int64, drafts are the ids [T] of a step's rows, of which these are the nodes'.
    Per seat: length, temperature (0 is greedy), top_k (0 is off), top_p, min_p, seed, coupled (its drafts are point
    masses; else they are a chain drawn from draft_probs [seats, K', V]; None: all are coupled).

    → tokens [R, depth+1], accepted [R], path [R, depth+1] int64, failed [R] bool: a node on the path had no finite largest logit.
    """
    requests, nodes, _ = logits.shape
    assert logits.is_contiguous() and logits.dtype == torch.float32, (logits.shape, logits.dtype)
    assert (drafts if sample_rows is None else sample_rows[:, 1:]).shape == (requests, nodes - 1), (logits.shape, drafts.shape)
    assert sample_rows is None or sample_rows.is_contiguous(), sample_rows.stride()
    drafts, device = drafts.contiguous(), logits.device
    q = None if nodes == 1 or all_greedy else draft_probs
    tokens = torch.empty(requests, depth + 1, dtype=torch.int64, device=device)
    path, accepted = torch.empty_like(tokens), torch.empty(requests, dtype=torch.int64, device=device)
    failed = torch.empty(requests, dtype=torch.bool, device=device)
    cuts = top_k if any_top_k else None, top_p if any_top_p else None, min_p if any_min_p else None
    parts = chunks(logits, seats, None if all_greedy else temperature, any(cut is not None for cut in cuts))
    winners, coins = None, None
    if not all_greedy:
        winners, coins = race(logits, drafts, sample_rows, depths, seats, length, temperature, cuts, seed, coupled, q, parts)
    warps = min(8, max(1, triton.next_power_of_2(nodes) * triton.next_power_of_2(parts.number) // KEYS_PER_WARP))
    walk_kernel[(requests,)](
        drafts, sample_rows, num_draft_tokens, parents, seats, temperature, coupled, parts.keys, winners, coins, tokens, accepted, path,
        failed, 0 if parents is None else parents.stride(0), NODES=nodes, DEPTH=depth, CHUNKS=parts.number, num_warps=warps,
    )  # fmt: skip
    return tokens, accepted, path, failed


def race(
    logits: Tensor, drafts: Tensor, sample_rows: Tensor | None, depths: Tensor | None, seats: Tensor, length: Tensor, temperature: Tensor,
    cuts: tuple[Tensor | None, Tensor | None, Tensor | None], seed: Tensor, coupled: Tensor, q: Tensor | None, parts: Chunks,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """`cuts`: top_k, top_p and min_p, None where no request uses it; the others are those of `accept`.
    → winners [R * (K+1), PARTS, chunks] and coins [R * (K+1)], as race_kernel has them."""
    (_, nodes, vocab), (rows, number), device = logits.shape, parts.keys.shape, logits.device
    assert q is None or (q.shape[2] == vocab and q.stride(1) == vocab and q.stride(2) == 1), (q.shape, q.stride())
    block, _ = chunks_of(vocab)
    cut_orders, totals = row_cuts(logits, parts, seats, temperature, cuts)
    winners = torch.empty(rows, PARTS.value, number, dtype=torch.int64, device=device)
    coins = None if q is None else torch.empty(rows, dtype=torch.int32, device=device)
    q_stride, q_nodes = (0, 0) if q is None else (q.stride(0), min(q.shape[1], nodes - 1))
    race_kernel[(rows * number,)](
        logits, drafts, sample_rows, depths, seats, length, temperature, seed, coupled, q, parts.keys, parts.masses, cut_orders, totals,
        winners, coins, 0 if depths is None else depths.stride(0), q_stride, q_nodes, NODES=nodes, V=vocab, BV=block, CHUNKS=number,
        num_warps=WARPS,
    )  # fmt: skip
    return winners, coins
