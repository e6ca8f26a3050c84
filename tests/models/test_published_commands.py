"""What users do with published checkpoints before they download them: `mtpserve inspect` on their headers, and `--load-format dummy` on a
model with the keys of their config and small sizes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from mtpserve.config import CacheConfig, EngineConfig, ModelConfig, SpecConfig
from mtpserve.core.request import Request
from mtpserve.core.sampling import SamplingParams
from mtpserve.engine.startup.build import build_engine
from mtpserve.models.registry import FAMILIES
from mtpserve.tools.inspect import inspect_command as inspect
from tests import selection
from tests.models.test_published import PUBLISHED, Published, tensors, write

# Otherwise a CPU drafts in int8.
PLAIN = ("--speculative-algorithm", "MTP", "--speculative-draft-model-quantization", "none")
COPIES = "MTP layer: copies of embedding and head, not loaded"


def inspected(directory: Path, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    assert inspect.run([str(directory), "--dtype", "bfloat16", "--json", *options]) == 0
    return dict(json.loads(capsys.readouterr().out))


def total(report: dict[str, Any], column: str, *, mtp: bool) -> int:
    return sum(row[column] for row in report["weights"] if row["group"].startswith("MTP layer") == mtp)


# Tensors and parameters of all are in test_published.py.
@pytest.mark.parametrize("published", selection.every_nth({name: (published,) for name, published in PUBLISHED.items()}, 3))
def test_inspect(tmp_path: Path, published: Published, capsys: pytest.CaptureFixture[str]) -> None:
    trunk, mtp = tensors(published)
    write(tmp_path, published.config, trunk | mtp)
    config, has_mtp = published.config, published.mtp is not None
    layers = config["num_hidden_layers"] if "num_hidden_layers" in config else 2 * config["num_layers"]
    report = inspected(tmp_path, capsys, *(PLAIN if has_mtp else ()))
    assert (report["mtp_prefix"] is not None) == has_mtp == (report["arch"]["mtp"] is not None)
    assert len(report["arch"]["layers"]) == layers + (0 if report["arch"]["mtp"] is None else report["arch"]["mtp"]["layers"])
    if "_blocks" in str(list(trunk)):
        # Of a quantised matrix the numbers that it stands for are counted.
        assert total(report, "parameters", mtp=False) == published.parameters
        return
    numbers = {name: math.prod(shape) for name, shape in (trunk | mtp).items()}
    inside = sum(numbers[name] for name in mtp)
    assert total(report, "parameters", mtp=True) == inside and (inside > 0) == has_mtp
    assert total(report, "parameters", mtp=False) == sum(numbers.values()) - inside
    assert published.parameters in (None, sum(numbers.values()) - inside)
    assert sum(row["tensors"] for row in report["weights"]) == len(numbers)
    # Tables are whole numbers.
    assert all(row["bytes"] == 2 * row["parameters"] and row["dtype"] == "BF16" for row in report["weights"] if row["dtype"] != "I32")
    memory = {row["what"]: row["bytes"] for row in report["memory"]}
    # Routers are kept in float32.
    copies = sum(row["parameters"] for row in report["weights"] if row["group"] == COPIES)
    assert 0 <= memory["weights"] / (2 * (sum(numbers.values()) - inside)) - 1 < 0.01
    assert 0 <= memory.get("weights, MTP layer", 0) - 2 * (inside - copies) < 0.01 * 2 * inside + 1
    assert any(what.startswith("KV, ") for what in memory)
    assert any(note.startswith("planned for bfloat16 on cpu") for note in report["notes"])
    if len(numbers) > 2000:
        return  # tables are no others for thousands of experts' tensors, which take seconds to read again
    assert inspect.run([str(tmp_path), "--dtype", "bfloat16"]) == 0
    shown = capsys.readouterr().out
    assert f"{sum(numbers.values()):,}" in shown and (f"{report['mtp_prefix']}*" in shown) == has_mtp


def test_inspect_of_float8(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """DeepSeek-V3 as it is published, but for the number of experts."""
    published = PUBLISHED["DeepSeek-V3"]
    trunk, mtp = tensors(published)
    shapes = trunk | mtp
    stored = {name for name in shapes if name.endswith(("_proj.weight", "_proj_with_mqa.weight")) and "eh_proj" not in name}
    scales = {f"{name}_scale_inv": tuple(-(-size // 128) for size in shapes[name]) for name in stored}
    quantised = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    write(
        tmp_path, published.config | {"quantization_config": quantised}, shapes | scales,
        lambda name: "F32" if name in scales else "F8_E4M3" if name in stored else "BF16",
    )  # fmt: skip
    report = inspected(tmp_path, capsys, "--quantization", "fp8", "--attention-backend", "reference")
    sizes = {name: math.prod(shape) * (4 if name in scales else 1 if name in stored else 2) for name, shape in (shapes | scales).items()}
    assert sum(row["bytes"] for row in report["weights"]) == sum(sizes.values())
    memory = {row["what"]: row["bytes"] for row in report["memory"]}
    # Projections that attention needs as a product are in bfloat16.
    assert 0.99 < memory["weights"] / sum(size for name, size in sizes.items() if not name.startswith("model.layers.61.")) < 1.02
    if selection.ALL:
        # As its index of tensors says, which counts the headers.
        assert sum(sizes.values()) == pytest.approx(688_586_727_753, rel=1e-4) and 0.99 < memory["weights"] / 675e9 < 1.01


SMALL: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64, "vocab_size": 300,
    "head_dim": 16, "q_lora_rank": 48, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "num_hidden_layers": 4, "max_window_layers": 4, "max_position_embeddings": 256, "n_routed_experts": 16, "num_experts": 16,
    "eos_token_id": 299, "num_attention_heads": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 16, "hybrid_override_pattern": "ME*M", "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16,
    "moe_shared_expert_intermediate_size": 48, "moe_latent_size": 32,
    "o_groups": 2, "o_lora_rank": 16, "index_head_dim": 16, "num_layers": 2, "ffn_hidden_size": 96, "expert_ffn_hidden_size": 32,
    "zero_expert_num": 8, "moe_topk": 5,
}  # fmt: skip


def twin(config: dict[str, Any]) -> dict[str, Any]:
    """The same keys with small sizes; what is a count of others, or a switch, stays."""
    few = {key: value for key, value in SMALL.items() if key in config}
    grouped = config.get("num_key_value_heads", config.get("num_attention_groups", math.inf)) < config["num_attention_heads"]
    types = {key: config[key][:4] for key in ("layer_types", "hybrid_layer_pattern", "moe_layer_freq") if isinstance(config.get(key), list)}
    if config.get("num_experts_per_tok", 0) > SMALL["n_routed_experts"]:
        few["num_experts_per_tok"] = 5
    if "rotary_dim" in config:
        few |= {"rotary_dim": 8, "attn_type_list": None}
    if "swa_head_dim" in config:
        few |= {"head_dim": 24, "swa_head_dim": 24, "swa_v_head_dim": 16, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2}
    if "attention_other_setting" in config:
        # Lists go on with those of the MTP layers.
        types = {}
        few |= {"moe_num_experts": 16, "share_expert_dim": 32, "attention_other_setting": {"num_attention_heads": 6, "head_dim": 16}}
    return config | few | types | {"num_key_value_heads": min(config.get("num_key_value_heads", 4), 2 if grouped else 4)}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_small_one_with_random_weights(tmp_path: Path, name: str) -> None:
    """Greedy text is the same with drafts and without: those of the MTP layer, or where there is none of the text itself, as predicted."""
    published = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(twin(published.config)))
    model, pool = ModelConfig(model=str(tmp_path), load_format="dummy", dtype="float32"), CacheConfig(max_total_tokens=1024)
    source = "NGRAM" if published.mtp is None else "MTP"
    texts: list[list[int]] = []
    drafts = []
    for spec in (SpecConfig(speculative_algorithm="none"), SpecConfig(speculative_algorithm=source, speculative_num_steps=2)):
        engine = build_engine(EngineConfig(model=model, cache=pool, spec=spec), poison=True)
        family = FAMILIES.get(published.config["architectures"][0])
        assert (engine.card.tool_call_parser, engine.card.reasoning_parser) == (family.tool_call_parser, family.reasoning_parser)
        predicted = texts[0] if texts and published.mtp is None else []
        params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
        engine.add(Request("0", [*range(5, 15)] * 3, params, prediction=predicted))
        events = []
        while engine.has_work:
            events += engine.step()
        assert all(event.error is None for event in events)
        texts.append([token for event in events for token in event.tokens])
        drafts.append(engine.stats.draft_tokens_total)
    assert texts[0] == texts[1] and len(texts[0]) == 12 and drafts[0] == 0 < drafts[1]
