"""Whole stacks of layers in one call: the tokens are those of plain torch, in float32, for every kind of layer that the op has."""

from __future__ import annotations

import pytest
import torch

from mtpserve.core.sampling import SamplingParams
from mtpserve.layers import cpu_kernels
from mtpserve.layers.cpu_kernels import FusedStack, LayerStack
from mtpserve.layers.moe import MoE
from tests.tiny import prompts, run, tiny_engine, tiny_model


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("family", ["deepseek", "mimo", "glm", "qwen"])
def test_tokens_are_those_of_plain_torch(family: str, drafts: int) -> None:
    asked, params = prompts(4, longest=20), SamplingParams(max_tokens=12, temperature=0)
    model = tiny_model(family, kernels="cpu")
    assert isinstance(model.run_layers, LayerStack) and model.mtp_head is not None and isinstance(model.mtp_head.run_layer, FusedStack)
    wanted = run(tiny_engine(tiny_model(family), drafts, page_size=16), asked, params)
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
