"""The reference of recurrent layers: against transformers' rules over whole texts, however these are cut into spans."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from mtpserve_kernels.recurrent.reference import LayerState, Rule, StateSpans, recur
from torch import Tensor
from transformers.models.nemotron_h.modeling_nemotron_h import mamba2_chunk_scan
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule

from tests.kernels.recurrences import DELTA, MAMBA2, RULES, Case, case


def whole(x: Tensor, gates: Tensor, conv: Tensor, rule: Rule, skip: Tensor | None) -> Tensor:
    """One text [T, channels] from its first token on, by transformers."""
    taps, bias = conv[: rule.taps].T.unsqueeze(1), conv[-1] if rule.mamba2 else None
    mixed = F.silu(F.conv1d(F.pad(x.T, (rule.taps - 1, 0)), taps, bias, groups=rule.channels)).T
    keys = rule.key_heads * rule.key_dim
    if rule.mamba2:
        v, k, q = mixed.split([rule.value_heads * rule.value_dim, keys, keys], -1)
        v, k, q = (
            part.unflatten(-1, (heads, -1))[None] for part, heads in ((v, rule.value_heads), (k, rule.key_heads), (q, rule.key_heads))
        )
        rate = gates[0, 0] / gates[0, 1]
        found: Tensor = mamba2_chunk_scan(v, gates[None, :, 1], rate, k, q, chunk_size=5, D=skip)
        return found[0]
    q, k, v = mixed.split([keys, keys, rule.value_heads * rule.value_dim], -1)
    q, k, v = (part.unflatten(-1, (heads, -1))[None] for part, heads in ((q, rule.key_heads), (k, rule.key_heads), (v, rule.value_heads)))
    q, k = (part.repeat_interleave(rule.value_heads // rule.key_heads, 2) for part in (q, k))  # older releases do not do it themselves
    out, _ = torch_recurrent_gated_delta_rule(q, k, v, g=gates[None, :, 0], beta=gates[None, :, 1], use_qk_l2norm_in_kernel=True)
    return out[0]


def span(length: int, drafts: int, replay: int, fresh: bool, parents: list[int] | None = None) -> StateSpans:
    lists = [0], [0, length + drafts], [length], [replay]
    tree = None if parents is None else torch.tensor([parents])
    return StateSpans(*map(torch.tensor, lists), torch.tensor([int(fresh)]), tree, None, None, drafts)


@pytest.mark.parametrize("rule", RULES)
def test_a_text_is_the_same_however_it_is_cut(rule: Rule) -> None:
    """Chunks, steps with drafts of which some are accepted, and single tokens."""
    torch.manual_seed(0)
    tokens = 23
    x, conv = torch.randn(tokens, rule.channels), torch.randn(rule.taps + rule.mamba2, rule.channels)
    gates = torch.stack([-torch.rand(tokens, rule.value_heads), torch.rand(tokens, rule.value_heads)], 1)
    skip = torch.randn(rule.value_heads) if rule.mamba2 else None
    if rule.mamba2:
        gates[:, 0] = -gates[:, 1] * torch.rand(rule.value_heads)  # a step, times a number of each head
    wanted = whole(x, gates, conv, rule, skip)
    layer = LayerState(*(torch.full_like(part, torch.nan) for part in case(rule, 0, trees=False).layer))
    done = replay = 0
    for length, drafts, accepted in ((7, 0, 0), (4, 0, 0), (1, 3, 2), (1, 3, 0), (1, 4, 4), (1, 0, 0), (1, 1, 0)):
        rows = slice(done, done + length + drafts)
        given, given_gates = x[rows].clone(), gates[rows].clone()
        given[length + accepted :] += 1  # drafts that are not the text's
        found = recur(given, given_gates, conv, layer, span(length, drafts, replay, done == 0), rule, skip)
        right = length + accepted
        torch.testing.assert_close(found[:right], wanted[done : done + right], atol=1e-5, rtol=1e-4)
        done, replay = done + right, accepted
    assert done > 15


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("rule", [DELTA[1], MAMBA2[1]])
def test_a_node_of_a_tree_is_its_path_alone(rule: Rule, seed: int) -> None:
    given = case(rule, seed, trees=True)
    own = given.rule, given.skip
    found = recur(given.x, given.gates, given.conv, given.copied(), given.spans, *own)
    for r, req_idx in enumerate(given.spans.seats.tolist()):
        first, end = given.spans.query_start_loc[r : r + 2].tolist()
        length, parents = int(given.spans.length[r]), given.spans.parents
        assert parents is not None
        for node in range(1, end - first - length + 1):
            path, at = [node], int(parents[r, node - 1])
            while at:
                path, at = [at, *path], int(parents[r, at - 1])
            rows = [*range(first, first + length), *(first + length + number - 1 for number in path)]
            one = span(length, len(path), int(given.spans.replay[r]), bool(given.spans.fresh[r]))._replace(seats=torch.tensor([req_idx]))
            alone = recur(given.x[rows], given.gates[rows], given.conv, given.copied(), one, *own)
            torch.testing.assert_close(alone[-1], found[first + length + node - 1])


@pytest.mark.parametrize("seed", [1, 3])
def test_a_state_that_is_kept_is_one_that_a_request_had(seed: int) -> None:
    given = case(RULES[1], seed, trees=False)
    layer = given.copied()
    recur(given.x, given.gates, given.conv, layer, given.spans, given.rule)
    assert given.spans.keep_after is not None and given.spans.keep_in is not None
    for r, after in enumerate(given.spans.keep_after.tolist()):
        if after:
            first, place, replay = int(given.spans.query_start_loc[r]), int(given.spans.keep_in[r]), int(given.spans.replay[r])
            committed = max(after - replay, 0)
            rows, req_idx = slice(first, first + committed), given.spans.seats[r : r + 1]
            one = span(committed, 0, min(after, replay), bool(given.spans.fresh[r]))._replace(seats=req_idx)
            alone = given.copied()
            recur(given.x[rows], given.gates[rows], given.conv, alone, one, given.rule)
            torch.testing.assert_close(layer.state[place], alone.state[req_idx[0]])
            torch.testing.assert_close(layer.before[place], alone.before[req_idx[0]])


def compared(given: Case, kernel: object, tolerance: float) -> None:
    """Outputs, states and what waits, with the reference's."""
    ours, theirs = given.copied(), given.copied()
    arguments, own = (given.x, given.gates, given.conv), (given.spans, given.rule, given.skip)
    found = kernel(*arguments, ours, *own)  # type: ignore[operator]
    wanted = recur(*arguments, theirs, *own)
    torch.testing.assert_close(found, wanted, atol=tolerance, rtol=tolerance)
    for part, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(part, other, atol=tolerance, rtol=tolerance, equal_nan=True)
