"""Layers that attend to a window and to entries, by the kernels: plans and outputs against plain torch, logits against transformers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mtpserve.attention.compressed import plan_compressed
from mtpserve.attention.gpu.triton_compressed import compressed_spans
from mtpserve.attention.gpu.triton_selected import RowsSeen
from mtpserve.cache.stores import Stores
from mtpserve.config import SpecConfig
from mtpserve.core.arch.model import Attention, Compressed, KVLayout, Selected
from mtpserve.core.sampling import SamplingParams
from tests.heads.rounds import engine_of
from tests.kernels.test_engine import CHAIN, TREE
from tests.models.compressed_checkpoints import HEAVY, SLIDING, SPARSE, deepseek_v4
from tests.models.test_parity import FEW, compare
from tests.runtime.recorders import nothing_is_read
from tests.tiny import run

PAGE, PAGES, HEADS, DIM, NODES = 16, 4, 5, 24, 6
KINDS = {
    "all": Attention(KVLayout("mla", 1, DIM, DIM), 9, compressed=Compressed(8)),
    "selected, of tokens before their own, too": Attention(
        KVLayout("mla", 1, DIM, DIM), 5, compressed=Compressed(2, overlap=True, selected=Selected(4, 12))
    ),
}
# Of each node: its set of ancestors, itself included. The third is a child of the first; padding is on the path of the root alone.
FAMILY = {1: 0b11, 2: 0b101, 3: 0b1011, 4: 0b1}


class Seats:
    """core.batch.RequestTensors, as far as attention reads it."""

    def __init__(self, seats: int, device: torch.device) -> None:
        """Of all tokens, which has the entries, and of those in the window."""
        self.block_tables = torch.stack([torch.randperm(seats * PAGES, device=device).view(seats, PAGES) for _ in range(2)])
        self.padding_slots = [seats * PAGES * PAGE] * 2

    def slot_mapping(self, req_indices: Tensor, index: Tensor, group: int = 0) -> Tensor:
        return self.block_tables[group][req_indices, index // PAGE] * PAGE + index % PAGE


def batch_of(spans: list[tuple[int, int, int]], tree: bool, device: torch.device) -> Any:
    """spans: the seat, the first row's index and the number of rows of each; with a tree, then the nodes of FAMILY, of which the last is
    padding."""
    seats, index, bits, spanning = [], list[int](), list[int](), []
    ends, lengths, roots = [0], [], []
    for number, (req_idx, first, rows) in enumerate(spans):
        root = first + rows - 1
        nodes = [(root + node, bit) for node, bit in FAMILY.items()] if tree else []
        own = [*((first + row, -1) for row in range(rows)), *nodes]
        seats += [req_idx] * len(own)
        spanning += [number] * len(own)
        index += [column for column, _ in own]
        bits += [bit for _, bit in own]
        ends.append(len(index))
        lengths.append(own[-1][0] + (0 if tree else 1))
        roots.append(root)
    whole = {"token_req_indices": seats, "token_indices": index, "query_start_loc": ends, "seq_lens": lengths}
    given: dict[str, Any] = {name: torch.tensor(values, device=device) for name, values in whole.items()}
    req_tensors = Seats(3, device)
    given |= {
        "req_tensors": req_tensors,
        "req_indices": torch.tensor([span[0] for span in spans], device=device),
        "shift": 0,
        "unstored": None,
    }
    given |= {"tree_bits": None, "tree_start": None, "input_ids": given["token_indices"]}
    if tree:
        given |= {"tree_bits": torch.tensor(bits, device=device), "tree_start": torch.tensor(roots, device=device)}
    given["slot_mapping"] = req_tensors.slot_mapping(given["token_req_indices"], given["token_indices"])
    return SimpleNamespace(**given)


@pytest.mark.parametrize("tree", [False, True], ids=["chains", "trees"])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_as_in_plain_torch(kind: Attention, tree: bool, device: torch.device) -> None:
    """Requests that have no entry yet, whose root completes one, and whose nodes do. Unwritten entries are NaN."""
    torch.manual_seed(1)
    stores = Stores([kind], [3 * PAGES + 1] * 2, PAGE, torch.float32, device, poison=True, nodes=(3, NODES))
    store, compressed = stores.stores[0], kind.compressed
    assert compressed is not None and store.entries is not None
    for first in (0, 5, 6, 13, 30):
        batch = batch_of([(2, 30, 1), (0, first, 3), (1, 38 + first // 5, 1)], tree, device)
        with nothing_is_read():
            spans = compressed_spans(batch, store, RowsSeen.of(batch), 0.3)
        wanted = plan_compressed(batch, store, PAGE, 0.3)
        number = len(wanted.completed.slots)
        written = spans.completed.slots != batch.req_tensors.padding_slots[0] // compressed.every
        assert int(written.sum()) == number
        for ours, theirs in zip(spans.completed, wanted.completed, strict=True):
            assert torch.equal(ours[written], theirs)
        pool, entries = store.pool.keys(0), store.entries.keys(0)
        pool[:], entries[:] = torch.randn_like(pool), torch.nan
        seen = torch.cat([*wanted.visible_entries]).unique()
        entries[seen] = torch.randn(len(seen), 1, DIM, device=device)
        q, sinks = torch.randn(len(batch.token_indices), HEADS, DIM, device=device), torch.randn(HEADS, device=device)
        if compressed.selected is not None:
            keys = store.entries.index_keys(0)
            keys.rows[:] = torch.nan
            keys.rows[seen] = torch.randn(len(seen), 1, 12, device=device)
            scores = torch.randn(len(q), 3, 12, device=device), torch.rand(len(q), 3, device=device)
            spans.select(*scores, 0)
            wanted.select(*scores, 0)
        span = torch.bucketize(torch.arange(len(q), device=device), batch.query_start_loc[1:], right=True)
        counts = batch.token_indices < batch.seq_lens[span]  # what padding sees is nobody's
        torch.testing.assert_close(spans.attend(q, 0, sinks)[counts], wanted.attend(q, 0, sinks)[counts], atol=1e-5, rtol=1e-5)


FEW_NUMBERS = {"layer_types": [HEAVY, SPARSE, SLIDING], "num_hidden_layers": 3, "n_routed_experts": 4, "num_experts_per_tok": 1}


@pytest.mark.thorough  # the interpreter takes half a minute
def test_logits_are_transformers(tmp_path: Path) -> None:
    compare(deepseek_v4(tmp_path, **FEW_NUMBERS), 16, "triton", FEW[1:])


@pytest.mark.thorough
@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_tokens_are_those_of_plain_torch(tmp_path: Path, shape: SpecConfig) -> None:
    """Of a prompt in two chunks, and of one that begins without any entry."""
    directory = deepseek_v4(tmp_path, **FEW_NUMBERS).directory
    asked, greedy = [[3, 5, 7, 11] * 6, [2]], SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
    plain = engine_of(directory, SpecConfig(speculative_algorithm="none"), backend="reference", page_size=16)
    engine = engine_of(directory, shape, backend="triton", page_size=16)
    assert run(engine, asked, greedy) == run(plain, asked, greedy)
    assert engine.stats.draft_tokens_total > 0
