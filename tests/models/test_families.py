"""Families' trunks: the logits are transformers', however the tokens are cut into steps."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from math import lcm
from pathlib import Path
from typing import Any

import pytest

from mtpserve.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, SpecConfig
from mtpserve.core.arch.model import tokens_of_entries
from mtpserve.core.errors import LoadError, UnsupportedModel
from mtpserve.core.sampling import SamplingParams
from mtpserve.engine.engine import Engine
from mtpserve.engine.startup.build import build_engine
from mtpserve.engine.startup.planning import describe
from mtpserve.quant.fp8 import quantize_block
from tests import selection
from tests.models.chained import FULL, SLIDING, step
from tests.models.checkpoints import YARN, Tiny, glm4_moe, glm4_moe_lite, llama, mistral, qwen2, qwen2_moe, qwen3, qwen3_moe, write
from tests.models.compressed_checkpoints import HEAVY, SPARSE, deepseek_v4
from tests.models.gemmas import SMALL, gemma4, gemma4_small
from tests.models.hybrids import nemotron_h, qwen3_5, qwen3_5_moe, qwen3_next
from tests.models.ling import ling
from tests.models.longcat import longcat
from tests.models.own_layouts import ernie, gpt_oss, mimo_v2, minimax_m2
from tests.models.sparse_checkpoints import deepseek_v32, glm_dsa
from tests.models.test_parity import CUTS, FEW, compare
from tests.tiny import run

LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
WINDOWS = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
TYPES = ["full_attention", "sliding_attention", "sliding_attention"]
FUSED = {"fused": True, "num_attention_heads": 8, "swa_num_attention_heads": 8, "num_key_value_heads": 2, "swa_num_key_value_heads": 4}
SEVERAL_BLOCKS = FUSED | {"head_dim": 48, "swa_head_dim": 48, "v_head_dim": 30, "swa_v_head_dim": 30}
Make = Callable[..., Tiny]
TRUNKS: dict[str, tuple[Make, dict[str, Any]]] = {
    "llama": (llama, {}),
    "llama 3.1's rotation": (llama, {"rope_scaling": LLAMA3, "rope_theta": 10000.0}),
    "llama, yarn, a length and a gain beside it": (
        llama,
        {
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "mscale": 0.707},
            "rope_theta": 10000.0,
            "original_max_position_embeddings": 16,
        },
    ),
    "llama, linear rotation": (llama, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "num_key_value_heads": 4}),
    "llama, all biases, tied head": (llama, {"attention_bias": True, "tie_word_embeddings": True}),
    "llama, other heads": (llama, {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 16}),
    "ernie 4.5": (ernie, {}),
    "ernie 4.5, some layers dense": (ernie, {"moe_layer_interval": 2, "moe_layer_end_index": 2, "num_hidden_layers": 5, "head_dim": 16}),
    "ernie 4.5, all sparse, tied head": (ernie, {"moe_layer_start_index": 0, "moe_num_shared_experts": 0, "tie_word_embeddings": True}),
    "mistral": (mistral, {}),
    "mistral, a window": (mistral, {"sliding_window": 6, "head_dim": 16}),
    "gpt-oss": (gpt_oss, {}),
    "gpt-oss, mxfp4": (gpt_oss, {"mxfp4": True, "hidden_size": 96, "swiglu_limit": 0.7}),
    "gpt-oss, many experts, other heads": (gpt_oss, {"num_local_experts": 20, "head_dim": 20, "num_attention_heads": 6}),
    "gpt-oss, other windows, no bias": (gpt_oss, {"layer_types": TYPES, "attention_bias": False, "rope_scaling": {"rope_type": "default"}}),
    "gemma 4": (gemma4, {}),
    "gemma 4, small": (gemma4, SMALL),
    "gemma 4, in a model that sees pictures, values of their own": (gemma4, SMALL | {"pictures": True, "sliding_window": 1}),
    "gemma 4, untied, biases": (gemma4, {"tie_word_embeddings": False, "attention_bias": True, "attention_k_eq_v": False}),
    "gemma 4, tied values, no cap, small": (gemma4, SMALL | {"attention_k_eq_v": True, "final_logit_softcapping": None}),
    "gemma 4 12B": (gemma4, {"unified": True, "layer_types": None, "num_hidden_layers": 7}),
    "minimax-m2": (minimax_m2, {}),
    "minimax-m2, all is rotated, a key head for all": (minimax_m2, {"rotary_dim": None, "num_key_value_heads": 1}),
    "minimax-m2, fp8": (minimax_m2, {"fp8": True, "hidden_size": 160, "intermediate_size": 136}),
    "minimax-m2, keys as transformers writes them": (
        minimax_m2,
        {
            "rotary_dim": None,
            "rope_theta": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e5, "partial_rotary_factor": 0.5},
            **dict.fromkeys(("attn_type_list", "use_qk_norm", "qk_norm_type", "scoring_func", "num_mtp_modules", "use_mtp")),
        },
    ),
    "mimo-v2": (mimo_v2, {}),
    "mimo-v2, values as wide as keys, not scaled": (mimo_v2, {"v_head_dim": 12, "swa_v_head_dim": 12, "attention_value_scale": None}),
    "mimo-v2.5": (mimo_v2, FUSED),
    "mimo-v2.5, chunks of several blocks": (mimo_v2, SEVERAL_BLOCKS),
    "step 3.5": (step, {}),
    "step 3.5, fp8, infix": (step, {"fp8": True, "hidden_size": 160, "moe_intermediate_size": 136, "infix": "transformer."}),
    "step 3.5, without lists": (
        step,
        {
            "swiglu_limits": None,
            "layer_types": None,
            "rope_theta": 1e4,
            "partial_rotary_factors": None,
            "moe_layers_enum": None,
            "num_nextn_predict_layers": None,
        },
    ),
    "step 3.5, by transformers' names": (
        step,
        {
            **dict.fromkeys(("num_attention_groups", "attention_other_setting", "rope_theta", "partial_rotary_factors", "rope_scaling")),
            **dict.fromkeys(("moe_layers_enum", "moe_num_experts", "moe_top_k", "yarn_only_types")),
            "num_key_value_heads": 2,
            "num_sliding_attention_heads": 6,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "mlp_layer_types": ["dense", *["sparse"] * 4, *["dense"] * 4],
            "query_pre_attn_scalar": 20,
            "rope_parameters": {
                FULL: {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
                SLIDING: {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "qwen2": (qwen2, {}),
    "qwen2, windows": (qwen2, WINDOWS),
    "qwen2 moe": (qwen2_moe, {}),
    "qwen2 moe, no bias, windows": (qwen2_moe, {"qkv_bias": False, "norm_topk_prob": False, **WINDOWS, "layer_types": TYPES}),
    "qwen3": (qwen3, {}),
    "qwen3, biases, windows, tied head": (qwen3, {"attention_bias": True, "tie_word_embeddings": True, **WINDOWS}),
    "qwen3, heads that are wider": (qwen3, {"head_dim": 20, "num_key_value_heads": 4}),
    "qwen3 moe": (qwen3_moe, {}),
    "qwen3 moe, some layers dense": (qwen3_moe, {"decoder_sparse_step": 2, "num_hidden_layers": 4, "norm_topk_prob": False}),
    "qwen3 moe, named layers dense": (qwen3_moe, {"mlp_only_layers": [0, 2], "num_experts_per_tok": 1}),
    "glm 4.5": (glm4_moe, {"use_qk_norm": False}),
    "glm 4.6": (glm4_moe, {"attention_bias": False}),
    "glm, groups, fp8": (glm4_moe, {"fp8": True, "hidden_size": 160, "n_group": 4, "topk_group": 2, "head_dim": 16}),
    "glm, a quarter rotated": (glm4_moe, {"head_dim": 16, "partial_rotary_factor": 0.25, "first_k_dense_replace": 0}),
    "qwen3-next": (qwen3_next, {}),
    "qwen3-next, dense layers, other heads": (qwen3_next, {"mlp_only_layers": [1], "linear_num_key_heads": 1, "norm_topk_prob": False}),
    "qwen3.5": (qwen3_5, {}),
    "qwen3.5, tied head, in a model that sees pictures": (qwen3_5, {"pictures": True, "tie_word_embeddings": True, "seed": 1}),
    "qwen3.5, most layers attend": (qwen3_5, {"layer_types": ["full_attention", "linear_attention", *["full_attention"] * 2]}),
    "qwen3.5, short convolution": (qwen3_5, {"linear_conv_kernel_dim": 2, "attention_bias": True, "linear_key_head_dim": 12}),
    "qwen3.5 moe": (qwen3_5_moe, {}),
    "qwen3.5 moe, in a model that sees pictures": (qwen3_5_moe, {"pictures": True}),
    "nemotron 3": (nemotron_h, {}),
    "nemotron 3, latent experts, groups": (nemotron_h, {"moe_latent_size": 20, "n_group": 4, "topk_group": 2, "n_groups": 4}),
    "nemotron 3, listed, no bias, one group": (nemotron_h, {"listed": True, "use_conv_bias": False, "n_groups": 1, "conv_kernel": 2}),
    "nemotron-h": (nemotron_h, {"hybrid_override_pattern": "-MM*-", "num_hidden_layers": 5, "num_nextn_predict_layers": 0}),
    "deepseek v3.2": (deepseek_v32, {}),
    "deepseek v3.2, yarn, groups, fp8": (deepseek_v32, {"fp8": True, "hidden_size": 160, "rope_scaling": YARN, "n_group": 2}),
    "deepseek v3.2, one token, all is rotated": (deepseek_v32, {"index_topk": 1, "index_head_dim": 8}),
    "deepseek v4": (deepseek_v4, {}),
    "deepseek v4, older keys, no scaling": (
        deepseek_v4,
        {
            "layer_types": None,
            "compress_ratios": [0, 4, 128, 0, 0],
            "compress_rates": None,
            "compress_rate_csa": 5,
            "compress_rate_hca": 15,
            "rope_scaling": None,
            "num_hash_layers": None,
            "sliding_window": 3,
            "hc_mult": 2,
        },
    ),
    "deepseek v4, by default, other scores, tied head": (
        deepseek_v4,
        {
            "layer_types": None,
            "num_hidden_layers": 3,
            "num_hash_layers": 0,
            "scoring_func": "sigmoid",
            "tie_word_embeddings": True,
            "compress_rates": {SPARSE: 3, HEAVY: 5},
            "n_routed_experts": 20,
            "index_topk": 64,
        },
    ),
    "deepseek v4, as it is quantised": (deepseek_v4, {"fp4": True, "hidden_size": 160, "head_dim": 64}),
    "deepseek v4, keys as transformers writes them": (
        deepseek_v4,
        {
            "mlp_layer_types": ["moe", "hash_moe", "hash_moe", "moe"],
            "num_hash_layers": None,
            "qk_rope_head_dim": None,
            "partial_rotary_factor": 0.5,
            "rope_scaling": None,
            "compress_rates": {SPARSE: 3, HEAVY: 15},
            "o_groups": 4,
            "rope_parameters": {
                "main": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5},
                "compress": {
                    "rope_type": "yarn",
                    "rope_theta": 90000.0,
                    "partial_rotary_factor": 0.5,
                    "factor": 8.0,
                    "attention_factor": 1.0,
                    "original_max_position_embeddings": 32,
                },
            },
        },
    ),
    "ling 2.0": (ling, {}),
    "ling 2.0, biases, no norms, yarn, tied head": (
        ling,
        {
            "use_qkv_bias": True,
            "use_qk_norm": False,
            "tie_word_embeddings": True,
            "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        },
    ),
    "ling 2.0, all groups, two shared experts, fp8": (
        ling,
        {"fp8": True, "hidden_size": 160, "topk_group": 4, "num_shared_experts": 2, "norm_topk_prob": False, "head_dim": 16},
    ),
    "longcat-flash": (longcat, {}),
    "longcat-flash, fp8, yarn, many experts": (
        longcat,
        {"fp8": True, "hidden_size": 160, "rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}, "n_routed_experts": 20},
    ),
    "longcat-flash, nothing that computes nothing, tied head": (longcat, {"zero_expert_num": 0, "tie_word_embeddings": True}),
    "glm 4.7 flash": (glm4_moe_lite, {}),
    "glm 4.7 flash, named layers dense": (glm4_moe_lite, {"mlp_layer_types": ["sparse", "dense", "sparse"], "q_lora_rank": None}),
    "glm 5": (glm_dsa, {"indexer_types": None, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}),
    "glm 5.2": (glm_dsa, {}),
    "glm 5.2, by a pattern": (glm_dsa, {"indexer_types": None, "index_topk_pattern": "FFSS", "num_hidden_layers": 4, "index_topk": 3}),
    "glm 5.2, one in two": (glm_dsa, {"indexer_types": None, "index_topk_freq": 2, "num_hidden_layers": 5}),
}


BACKENDS = ("reference", "cpu", "exact")


def trunk_cases() -> Iterator[Any]:
    """The quick selection takes one backend of each config, by turns, so that families with several are computed by all."""
    for number, (name, case) in enumerate(TRUNKS.items()):
        for i, backend in enumerate(BACKENDS):
            yield pytest.param(*case, backend, id=f"{name}-{backend}", marks=() if i == number % len(BACKENDS) else pytest.mark.thorough)


@pytest.mark.parametrize(("make", "options", "backend"), [*trunk_cases()])
def test_trunks(tmp_path: Path, make: Make, options: dict[str, Any], backend: str) -> None:
    if backend == "cpu":
        pytest.importorskip("mtpserve_kernels.cpu.library")
    tiny = make(tmp_path, **options)
    layers = describe(EngineConfig(model=ModelConfig(model=str(tmp_path))), want_mtp=False).arch.layers
    # The exact mode computes each row by itself, however many there are.
    compare(tiny, lcm(5, tokens_of_entries(layers)), backend, FEW if backend == "exact" else CUTS)


SHAPES = [
    SpecConfig(speculative_algorithm="NEXTN", speculative_num_steps=1, speculative_adaptive=False),
    SpecConfig(speculative_algorithm="NEXTN", speculative_num_steps=3),
    SpecConfig(speculative_algorithm="NEXTN", speculative_num_steps=2, speculative_eagle_topk=2, speculative_num_draft_tokens=5),
    SpecConfig(speculative_algorithm="NGRAM"),
]


WITHOUT_MTP = [llama, minimax_m2, mistral, gpt_oss, gemma4, gemma4_small, qwen2, qwen2_moe, qwen3, qwen3_moe]
WITH_MTP = [
    qwen3_next,
    qwen3_5,
    qwen3_5_moe,
    nemotron_h,
    glm4_moe,
    glm4_moe_lite,
    deepseek_v32,
    glm_dsa,
    ernie,
    mimo_v2,
    step,
    ling,
    longcat,
]


KEYS = [*((make, "auto") for make in (*WITHOUT_MTP, *WITH_MTP)), (deepseek_v32, "fp8_e4m3")]
KEYS += [pytest.param(glm_dsa, "fp8_e4m3", marks=pytest.mark.thorough)]


@pytest.mark.parametrize(("make", "stored"), KEYS)
def test_texts_do_not_depend_on_drafts(tmp_path: Path, make: Make, stored: str) -> None:
    """Chunks, small pages and preemption, too; all requests at once against each one alone."""
    tiny = make(tmp_path)
    # Texts that repeat themselves, so that n-grams are drafted, too.
    asked = [[token % 5 + i for token in range(n)] for i, n in enumerate((9, 17, 30, 1, 12, 21))]
    sampling = [SamplingParams(max_tokens=24, temperature=0.6 * (i % 2), seed=i, ignore_eos=True) for i in range(len(asked))]
    alone = engine_of(tiny, SpecConfig(speculative_algorithm="none"), 400, 64, stored)  # no prompt is the beginning of another one
    plain = [run(alone, [ids], one)[0] for ids, one in zip(asked, sampling, strict=True)]
    assert alone.stats.cached_prompt_tokens_total == 0
    quick_shape = SHAPES[1 + WITH_MTP.index(make) % 2] if tiny.mtp is not None else SHAPES[-1]  # a chain or a tree, by turns
    for shape in SHAPES if selection.ALL and tiny.mtp is not None else [quick_shape]:
        # A small pool preempts, and its budget cuts prompts; one shape has a large one, too.
        for tokens, budget in ((110, 14), (400, 64)) if shape is SHAPES[1] or tiny.mtp is None else ((110, 14),):
            engine = engine_of(tiny, shape, tokens, budget, stored)
            texts = run(engine, asked, sampling)
            # With a fixed depth only the law of a sampled text is that of plain decoding.
            kept = [i for i in range(len(asked)) if i % 2 == 0 or shape.speculative_adaptive]
            assert [texts[i] for i in kept] == [plain[i] for i in kept]
            assert (engine.stats.preemptions_total > 0) == (tokens == 110)
            # Not every random model repeats itself.
            assert engine.stats.accepted_tokens_total > 0 or (tiny.mtp is not None and shape is SHAPES[-1])


def engine_of(tiny: Tiny, spec: SpecConfig, tokens: int, budget: int, stored: str) -> Engine:
    config = EngineConfig(
        model=ModelConfig(model=str(tiny.directory), device="cpu", dtype="float32"),
        cache=CacheConfig(page_size=5, max_total_tokens=tokens, kv_cache_dtype=stored),
        spec=spec,
        scheduler=SchedulerConfig(max_running_requests=4, chunked_prefill_size=budget),
    )
    return build_engine(config, poison=True)


@pytest.mark.parametrize("make", WITHOUT_MTP)
def test_a_family_without_an_mtp_layer_says_so(tmp_path: Path, make: Make) -> None:
    name = make(tmp_path).config["architectures"][0]
    config = EngineConfig(model=ModelConfig(model=str(tmp_path)), spec=SpecConfig(speculative_algorithm="NEXTN"))
    with pytest.raises(UnsupportedModel, match=f"the architecture {name} has no MTP layer; plain decoding is --speculative-algorithm none"):
        describe(config, want_mtp=True)


def test_fused_matrices_whose_order_nothing_tells_are_refused(tmp_path: Path) -> None:
    """Chunks that are not in float8, and a matrix in order that was made float8 as a whole."""
    name, options = "model.layers.0.self_attn.qkv_proj.weight", SEVERAL_BLOCKS
    for change, message in (
        (lambda t: {name: t[name].float()}, f"{name} is not stored in float8 with scales"),
        (lambda t: dict(zip((name, f"{name}_scale_inv"), quantize_block(t[name].float()), strict=True)), r"it needs \[6, 1\]"),
    ):
        tiny = mimo_v2(tmp_path / str(len(message)), **options)
        tensors = {key: tensor for key, tensor in tiny.tensors.items() if key != f"{name}_scale_inv"} | change(tiny.tensors)
        write(tiny.directory, tiny.config, tensors)
        with pytest.raises(LoadError, match=message):
            compare(tiny, 5, "reference")


@pytest.mark.parametrize(
    "wrong", [{"mtp_hybrid_override_pattern": "M*E"}, {"mtp_hybrid_override_pattern": None, "mtp_layers_block_type": ["moe"]}]
)
def test_an_mtp_layer_of_other_blocks_is_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    config = nemotron_h(tmp_path).config | wrong
    (tmp_path / "config.json").write_text(json.dumps(config))
    asked = EngineConfig(model=ModelConfig(model=str(tmp_path)), spec=SpecConfig(speculative_algorithm="NEXTN"))
    with pytest.raises(UnsupportedModel, match=r'mtp_.* is not supported; supported: attention and experts \("\*E"\)'):
        describe(asked, want_mtp=True)
    assert describe(asked, want_mtp=False).arch.mtp is None
