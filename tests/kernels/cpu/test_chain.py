"""All drafts of a chain in one call: the same bits as one draft after the other, for every kind of layer that the op has."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mtpserve.attention.cpu import CPUAttention
from mtpserve.config import SpecConfig
from mtpserve.core.batch import Batch, Hidden, VerifyOutput
from mtpserve.core.sampling import SamplingParams
from mtpserve.engine.engine import Engine
from mtpserve.layers.decoder import DecoderModel
from mtpserve.layers.embedding import Embedding
from mtpserve.spec.cpu import draft_chain
from mtpserve.spec.draft.chain import ChainDrafter, one_by_one
from mtpserve.spec.draft.passes import DraftPasses
from tests.runtime.recorders import runner_of
from tests.tiny import prompts, run, tiny_engine, tiny_model

STEPS = 3
PLAIN = SamplingParams(max_tokens=12, temperature=0)
ASKED = [
    PLAIN,
    replace(PLAIN, temperature=0.8),
    replace(PLAIN, temperature=1.0, seed=7),
    replace(PLAIN, temperature=0.7, top_k=20, top_p=0.9, min_p=0.01),
]


@dataclass
class Compared:
    """spec.passes.DraftChain, in one call and in several, which must give the same bits."""

    calls: int = 0
    stored: int = 0  # numbers
    sizes: set[int] = field(default_factory=set)
    split: set[bool] = field(default_factory=set)

    def __call__(
        self, passes: DraftPasses, batch: Batch, hidden: Hidden, verify_output: VerifyOutput, steps: int
    ) -> tuple[Tensor, Tensor | None]:
        req_indices = batch.drafted(batch.req_indices)
        self.split.add(passes.splits(batch, req_indices))
        attention, spare = passes.attention, batch.req_tensors.padding_slots[0]
        assert isinstance(attention, CPUAttention)
        (place,) = attention.stores.places
        pool = attention.stores.stores[place.store].pool
        keys, values = pool.keys(place.layer), pool.values(place.layer)
        places = batch.req_tensors.num_tokens[req_indices].unsqueeze(1) + torch.arange(steps - 1)
        slots = batch.req_tensors.slot_mapping(req_indices.repeat_interleave(steps - 1), places.flatten())
        slots = torch.cat([slots, batch.req_tensors.slot_mapping(batch.token_req_indices, batch.token_indices + 1)])
        slots = slots[slots < spare]  # several requests that have ended may write to the spare page
        tokens, q = one_by_one(passes, batch, hidden, verify_output, steps)
        stored = keys[slots].clone(), values[slots].clone()
        keys[slots], values[slots] = torch.nan, torch.nan
        own, own_q = draft_chain(passes, batch, hidden, verify_output, steps)
        assert torch.equal(own, tokens)
        assert q is own_q is None or (q is not None and own_q is not None and torch.equal(own_q, q))
        torch.testing.assert_close((keys[slots], values[slots]), stored, rtol=0, atol=0, equal_nan=True)
        self.stored += int(stored[0].isfinite().sum())
        self.calls += 1
        self.sizes.add(len(req_indices))
        return own, own_q


def passes_of(engine: Engine) -> DraftPasses:
    drafter: Any = runner_of(engine).drafter
    chain = getattr(drafter, "base", drafter)
    assert isinstance(chain, ChainDrafter)
    return chain.passes


def compared(model: DecoderModel, params: list[SamplingParams], drafts: int | SpecConfig = STEPS) -> tuple[DraftPasses, Compared]:
    engine = tiny_engine(model, drafts, page_size=16, backend="cpu")
    passes, both = passes_of(engine), Compared()
    assert passes.draft_chain is draft_chain
    passes.draft_chain = both
    run(engine, prompts(4, longest=20), params)
    assert both.calls > 3 and max(both.sizes) > 1 and both.stored > 0 and both.split == {False, True}
    return passes, both


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["deepseek", "mimo", "glm", "qwen"])
def test_the_same_bits(family: str, dtype: torch.dtype) -> None:
    """Of outputs before and after the last norm, of latent keys and those of heads, with all kinds of parameters side by side."""
    model = tiny_model(family, dtype=dtype, kernels="cpu")
    for params in (ASKED, [PLAIN] * 4):
        passes, _ = compared(model, params)
        assert passes.described.chain is not None


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_of_any_depth(steps: int) -> None:
    compared(tiny_model("mimo", kernels="cpu"), ASKED, steps)


def test_what_the_op_does_not_have_is_drafted_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a table that a tied head has packed."""
    monkeypatch.setattr(Embedding, "table", None)
    passes, _ = compared(tiny_model("mimo", kernels="cpu"), ASKED)
    assert passes.described.chain is None


def test_requests_with_rules_beside_others() -> None:
    compared(tiny_model("mimo", kernels="cpu"), [replace(ASKED[1], repetition_penalty=1.3), *ASKED[1:]])
