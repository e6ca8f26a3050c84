"""An inflated checkpoint computes what the small one does: all logits of the trunk and of three drafts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """The benchmarks' modules `trained` and `common.inflate`."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import trained
    from common import inflate

    return trained, inflate


def computed(trained: Any, directory: Path, ids: torch.Tensor) -> list[torch.Tensor]:
    config = json.loads((directory / "config.json").read_text())
    size = replace(
        trained.TOY, layers=config["num_hidden_layers"], hidden=config["hidden_size"], inner=config["intermediate_size"],
        heads=config["num_attention_heads"], kv_heads=config["num_key_value_heads"], vocab=config["vocab_size"],
    )  # fmt: skip
    model = trained.Model(size)
    named = load_file(directory / "model.safetensors")
    model.load_state_dict({name.removeprefix("model.").replace("mtp_layers.0", "mtp"): t.float() for name, t in named.items()})
    for module in model.modules():
        if isinstance(module, torch.nn.RMSNorm):
            module.eps = config["rms_norm_eps"]
    with torch.no_grad():
        logits, drafted = model(ids, 3)
    return [logits, *drafted]


@pytest.mark.parametrize("larger", [(2, 64, 96, 2, 1, 300), (5, 256, 160, 8, 4, 500), (3, 1024, 96, 2, 1, 301)])
def test_the_function_is_the_same(tools: tuple[Any, Any], tmp_path: Path, larger: tuple[int, ...]) -> None:
    trained, inflate = tools
    torch.manual_seed(3)
    model = trained.Model(trained.TOY)
    for name, weight in model.named_parameters():  # nothing at its initial value, so that nothing can be forgotten
        torch.nn.init.normal_(weight, mean=float("norm" in name), std=0.2)
    tokenizer = trained.tokenizer_of(["def f(x):\n    return x\n"], trained.TOY)
    trained.write(model, tokenizer, tmp_path / "small")
    parameters = inflate.inflate(tmp_path / "small", tmp_path / "large", inflate.Shape(*larger))
    ids = torch.randint(trained.TOY.vocab, (2, 40))
    small, large = (computed(trained, tmp_path / name, ids) for name in ("small", "large"))
    for expected, got in zip(small, large, strict=True):
        torch.testing.assert_close(got[..., : trained.TOY.vocab], expected, rtol=1e-4, atol=1e-4)
        assert got.argmax(-1).equal(expected.argmax(-1)), "a further token has the largest logit"
    tensors = load_file(tmp_path / "large" / "model.safetensors")
    zeros = sum(int((tensor == 0).sum()) for name, tensor in tensors.items() if "embed_tokens" not in name)
    assert zeros < 0.3 * parameters, "what the small model does not have is random where it can be"


REFUSED = {"power of 4": (2, 128, 96, 2, 1, 300), "grouped": (2, 256, 96, 4, 1, 300), "at least": (1, 256, 96, 2, 1, 300)}


@pytest.mark.parametrize("what", REFUSED)
def test_shapes_that_cannot_hold_the_model_are_refused(tools: tuple[Any, Any], tmp_path: Path, what: str) -> None:
    trained, inflate = tools
    trained.write(trained.Model(trained.TOY), trained.tokenizer_of(["x"], trained.TOY), tmp_path / "small")
    with pytest.raises(SystemExit, match=what):
        inflate.inflate(tmp_path / "small", tmp_path / "large", inflate.Shape(*REFUSED[what]))
