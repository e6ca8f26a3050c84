"""What CONTRIBUTING's table says of additions: one file, and one line in a registry. The files are tests/own_parts.py, and for draft models
tests/spec/own_drafters.py with its own test."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from mtpserve.attention.registry import BACKENDS
from mtpserve.config import CacheConfig, EngineConfig, ModelConfig, SpecConfig
from mtpserve.core.request import Request
from mtpserve.core.sampling import SamplingParams
from mtpserve.engine.startup.build import build_engine
from mtpserve.layers.decoder import DecoderModel
from mtpserve.layers.kernels import KERNELS
from mtpserve.models.registry import FAMILIES
from mtpserve.quant.registry import METHODS
from tests import own_parts
from tests.tiny import prompts, run, tiny_arch, tiny_engine, tiny_model

GREEDY = SamplingParams(max_tokens=12, temperature=0)


def test_a_family(tmp_path: Path) -> None:
    """Planned, loaded (with random weights) and served with its MTP layer."""
    config = {
        "architectures": ["OwnForCausalLM"], "num_hidden_layers": 2, "num_nextn_predict_layers": 1, "hidden_size": 32,
        "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 50,
        "max_position_embeddings": 64, "torch_dtype": "float32", "eos_token_id": 0,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = ModelConfig(model=str(tmp_path), load_format="dummy", dtype="float32")
    spec = SpecConfig(speculative_algorithm="MTP", speculative_num_steps=2)
    with FAMILIES.extended("OwnForCausalLM", "tests.own_parts:FAMILY"):
        engine = build_engine(EngineConfig(model=model, cache=CacheConfig(max_total_tokens=512), spec=spec))
    engine.add(Request("0", [1, 2, 3], SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)))
    events = []
    while engine.has_work:
        events += engine.step()
    assert sum(len(event.tokens) for event in events) == 8 and engine.stats.draft_tokens_total > 0
    assert "family" in own_parts.CALLED


def test_an_attention_backend() -> None:
    asked = prompts(3)
    with BACKENDS.extended("own", "tests.own_parts:OwnAttention"):
        engine = tiny_engine(tiny_model(kernels="torch"), 3, backend="own")
    assert run(engine, asked, GREEDY) == run(tiny_engine(tiny_model(kernels="torch"), 3), asked, GREEDY)
    assert "attention" in own_parts.CALLED


def test_a_devices_kernels() -> None:
    asked = prompts(3)
    with KERNELS.extended("own", "tests.own_parts:own_kernels"):
        model = tiny_model("mimo", kernels="own")
    assert run(tiny_engine(model, 3), asked, GREEDY) == run(tiny_engine(tiny_model("mimo", kernels="torch"), 3), asked, GREEDY)
    assert "kernels" in own_parts.CALLED


def test_a_number_format() -> None:
    asked, plain = prompts(3), tiny_model("mimo", kernels="torch")
    with METHODS.extended("doubled", "tests.own_parts:Doubled"):
        model: DecoderModel = own_parts.built(tiny_arch("mimo"), "doubled")
    given = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        parameter.data = given[name].data.clone()
    for part in reversed(list(model.modules())):
        if hasattr(part, "finish_loading"):
            part.finish_loading()
    assert run(tiny_engine(model.eval(), 3), asked, GREEDY) == run(tiny_engine(plain, 3), asked, GREEDY)
    assert "format" in own_parts.CALLED and torch.equal(model.head.weight, 2 * plain.head.weight)
