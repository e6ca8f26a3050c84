"""Whole stacks of layers in one call: the tokens are those of plain torch, in float32, for every kind of layer that the op has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from mtpserve.core.protocols.attention import Context
from mtpserve.core.sampling import SamplingParams
from mtpserve.layers.decoder import MTPHead
from mtpserve.layers.devices import cpu_kernels
from mtpserve.layers.devices.cpu_kernels import FusedStack, LayerStack
from mtpserve.layers.devices.torch_kernels import FusedApart, pack_layers
from mtpserve.layers.embedding import Embedding
from mtpserve.layers.kernels import RunFusedLayer
from mtpserve.layers.moe import MoE
from mtpserve.layers.rope import Rotation
from tests.tiny import prompts, run, tiny_engine, tiny_model


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("family", ["deepseek", "mimo", "glm", "qwen"])
def test_tokens_are_those_of_plain_torch(family: str, drafts: int) -> None:
    asked, params = prompts(4, longest=20), SamplingParams(max_tokens=12, temperature=0)
    model = tiny_model(family, kernels="cpu")
    assert isinstance(model.run_layers, LayerStack) and model.mtp_head is not None and isinstance(model.mtp_head.run_layer, FusedStack)
    wanted = run(tiny_engine(tiny_model(family, kernels="torch"), drafts, page_size=16), asked, params)
    assert run(tiny_engine(model, drafts, page_size=16, backend="cpu"), asked, params) == wanted


@torch.inference_mode()
@pytest.mark.parametrize("apart", [False, True])
def test_a_mixture_is_that_of_plain_torch(apart: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with a shared expert beside the others, where its size is not one of whole panels, and its gate."""
    if apart:
        monkeypatch.setattr(cpu_kernels, "shared_matrices", lambda shared: None)
    x = torch.randn(9, 32, generator=torch.Generator().manual_seed(1))
    own, plain = (tiny_model("qwen", kernels=kernels).layers[1].mlp for kernels in ("cpu", "torch"))
    assert isinstance(own, MoE) and own.shared_gate is not None
    torch.testing.assert_close(own(x), plain(x), rtol=1e-4, atol=1e-5)


@dataclass
class BothWays:
    """layers.kernels.RunFusedLayer, in one call and in several, which must give the same bits."""

    one: RunFusedLayer
    several: RunFusedLayer
    calls: list[str] = field(default_factory=list)

    def __call__(self, ids: Tensor, features: Tensor, rotation: Rotation, contexts: Sequence[Context]) -> tuple[Tensor, Tensor]:
        wanted = self.several(ids, features, rotation, contexts)
        stored = written(contexts)
        made = self.one(ids, features, rotation, contexts)
        assert torch.equal(made[0], wanted[0]) and torch.equal(made[1], wanted[1]) and torch.equal(stored, written(contexts))
        self.calls.append("run")
        return made

    def store(self, ids: Tensor, features: Tensor, rotation: Rotation, contexts: Sequence[Context]) -> None:
        self.several.store(ids, features, rotation, contexts)
        stored = written(contexts)
        contexts[0].keys[contexts[0].slots], contexts[0].values[contexts[0].slots] = torch.nan, torch.nan
        self.one.store(ids, features, rotation, contexts)
        assert torch.equal(stored, written(contexts))
        self.calls.append("store")


def written(contexts: Sequence[Context]) -> Tensor:
    """The step's keys and values."""
    (context,) = contexts
    return torch.cat([context.keys[context.slots].flatten(), context.values[context.slots].flatten()])


@pytest.mark.parametrize("looked_up_apart", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["deepseek", "mimo", "glm", "qwen"])
def test_embedding_fusion_and_layer_are_one_call(
    family: str, dtype: torch.dtype, looked_up_apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Latent keys and those of heads, with norms and biases and without. Apart, as a table that a tied head has packed."""
    if looked_up_apart:
        monkeypatch.setattr(Embedding, "table", None)
    model = tiny_model(family, dtype=dtype, kernels="cpu")
    head = model.mtp_head
    assert isinstance(head, MTPHead) and isinstance(head.run_layer, FusedStack)
    several = FusedApart(model.embed, head.fusion, head.layer, pack_layers([head.layer], head.norm or model.norm))
    head.run_layer = both = BothWays(head.run_layer, several)
    run(tiny_engine(model, 3, page_size=16, backend="cpu"), prompts(4, longest=40), SamplingParams(max_tokens=8, temperature=0))
    assert {*both.calls} == {"run", "store"}
