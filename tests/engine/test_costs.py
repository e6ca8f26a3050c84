"""The cost model's counts, against published parameter counts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mtpserve.core.arch.latent import IndexerArch, MLAArch
from mtpserve.core.arch.model import Attention, KVLayout, ModelArch, MoEArch, Selected
from mtpserve.core.arch.rope import RopeArch
from mtpserve.models import nemotron_h
from mtpserve.tools.simulate.costs import PROFILES, DeviceProfile, ModelShape, StepCost
from mtpserve.weights.checkpoint.hf_config import HFConfig

LLAMA_8B = ModelArch(
    family="llama", layers=(Attention(KVLayout("gqa", 8, 128, 128)),) * 32, hidden=4096, vocab=128256, heads=32, head_dim=128,
    intermediate=14336, rope=RopeArch(128, 5e5, False), norm_eps=1e-5, scale=0.1, max_positions=131072, tied_head=False, eos_ids=(1,),
    dtype="bfloat16",
)  # fmt: skip
DEEPSEEK_V3 = ModelArch(
    family="deepseek", layers=(Attention(KVLayout("mla", 1, 576, 512)),) * 61, hidden=7168, vocab=129280, heads=128, head_dim=192,
    intermediate=18432, rope=RopeArch(64, 1e4, True), norm_eps=1e-6, scale=0.1, max_positions=163840, tied_head=False, eos_ids=(1,),
    dtype="bfloat16", mla=MLAArch(1536, 512, 128, 64, 128), moe=MoEArch(256, 8, 2048, 2048, (0, 1, 2), 8, 4, 2.5, True),
)  # fmt: skip
NEMOTRON_3_NANO = {
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", "num_hidden_layers": 52, "hidden_size": 2688,
    "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "mamba_num_heads": 64, "mamba_head_dim": 64,
    "n_routed_experts": 128, "num_experts_per_tok": 6, "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712,
    "vocab_size": 131072, "eos_token_id": 2,
}  # fmt: skip


def test_the_default_shape_is_that_of_an_8b_model() -> None:
    shape, default = ModelShape.of(LLAMA_8B, 2, 2), ModelShape()
    # 8.03 billion with the embedding, which is not multiplied.
    assert shape.parameters == pytest.approx(8.03e9 - 128256 * 4096, rel=0.001) == pytest.approx(default.parameters, rel=0.002)
    assert (shape.layers, shape.kv_bytes, shape.pair_flops, shape.context) == (32, 131_072, 524_288, 131_072)
    assert (default.layers, default.kv_bytes, default.pair_flops, default.context) == (32, 131_072, 524_288, 131_072)
    assert shape.pass_bytes == pytest.approx(default.pass_bytes, rel=0.01)
    # Two hidden states side by side, then eight heads of keys and of values.
    assert (shape.kept_parameters, shape.kept_bytes) == (2 * 4096**2 + 4096 * 8 * 256, 2 * shape.kept_parameters)
    assert default.kept_bytes == 2 * default.kept_parameters == pytest.approx(shape.kept_bytes, rel=0.01)


def test_a_mixture_of_experts_reads_all_and_computes_with_some() -> None:
    shape = ModelShape.of(DEEPSEEK_V3, 1, 2)
    embedding = 129280 * 7168
    assert shape.weight_bytes == pytest.approx(671e9 - embedding, rel=0.002)
    assert shape.parameters == pytest.approx(37e9 - embedding / 2, rel=0.03)  # 37 billion active, as published
    assert shape.kv_bytes == 61 * 576 * 2
    assert shape.kept_bytes == shape.kept_parameters == 2 * 7168**2 + 7168 * 576


def test_blocks_that_are_layers_of_their_own_are_counted_once() -> None:
    """31.6 billion parameters, of which 3.2 compute a token, as published."""
    shape = ModelShape.of(nemotron_h.arch(HFConfig(Path("config.json"), NEMOTRON_3_NANO), 0), 1, 2)
    assert shape.weight_bytes == pytest.approx(31.58e9 - 131072 * 2688, rel=0.001)
    assert shape.parameters == pytest.approx(3.2e9, rel=0.02) and shape.kv_bytes == 6 * 2 * 2 * 128 * 2


def test_selected_tokens_cost_what_is_scored_and_what_is_taken() -> None:
    """However long a context is, a row attends to as many tokens; each is scored by the layers with an indexer."""
    kv = DEEPSEEK_V3.layers[0].kv
    kinds = [Attention(kv, selected=Selected(2048, dim)) for dim in (128, 0)]
    sparse = replace(DEEPSEEK_V3, layers=(kinds[0], *[kinds[1]] * 2) * 20, indexer=IndexerArch(64, False))
    dense = replace(DEEPSEEK_V3, layers=DEEPSEEK_V3.layers[:60])
    shape, without = ModelShape.of(sparse, 1, 2), ModelShape.of(dense, 1, 2)
    indexer = 20 * (1536 * 64 * 128 + 7168 * (128 + 64))
    assert shape.weight_bytes - without.weight_bytes == indexer and shape.kv_bytes == (60 * 576 + 20 * 128) * 2
    assert shape.parameters - without.parameters == indexer + 60 * 2048 * 128 * (576 + 512)
    assert shape.pair_flops == 20 * 2 * 64 * 128


def test_decoding_is_bound_by_weights_and_long_prompts_by_products() -> None:
    cost = StepCost.of(ModelShape(), DeviceProfile(4e12, 8e14, 0.0, 5e10))
    assert cost.seconds(1, 1, 1) == pytest.approx(15e9 / 4e12, rel=0.001)
    assert cost.seconds(8192, 8192, 8192**2 // 2) == pytest.approx((2 * 7.5e9 * 8192 + 524_288 * 8192**2 / 2) / 8e14)


def test_proposing_takes_a_layer_and_the_head_for_each_pass() -> None:
    plain, deep = (StepCost.of(ModelShape(), PROFILES["h200"], drafts, overhead=0.001) for drafts in (False, True))
    assert plain.overhead == deep.overhead == 0.001
    assert deep.weights == plain.weights
    assert deep.seconds(1, 1, 1, 0, [16, 1]) - deep.seconds(1, 1, 1) == pytest.approx(2 * 84e6 / 4.3e12)  # rows that it has to know
    assert plain.extend == plain.absorbed_row == 0.0
    assert deep.seconds(1, 1, 1, 3) - deep.seconds(1, 1, 1) == pytest.approx(3 * 1.486e9 / 4.3e12)
