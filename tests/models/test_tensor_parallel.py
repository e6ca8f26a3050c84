"""Several ranks of a model, as threads: all get the same numbers, which are those of the whole model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from mmap import mmap
from pathlib import Path
from threading import Thread, current_thread
from typing import Any

import pytest
import torch
from mtpserve_kernels.cpu.ranks import Exchange, exchange_bytes
from torch import Tensor

from mtpserve.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig, SchedulerConfig, SpecConfig
from mtpserve.core.errors import ConfigError
from mtpserve.core.protocols.parallel import ALONE, Ranks
from mtpserve.core.sampling import SamplingParams
from mtpserve.engine.engine import Engine
from mtpserve.engine.parallel.ticks import Ticks
from mtpserve.engine.startup.assemble import assemble
from mtpserve.engine.startup.build import load_part, options_of, sizes_of
from mtpserve.engine.startup.planning import plan
from mtpserve.layers.decoder import DecoderModel, MTPHead
from mtpserve.layers.devices import cpu_kernels
from mtpserve.spec.draft.chain import one_by_one
from tests.engine.peers import Table, ThreadPeers, together
from tests.heads import test_dflash as dflash, test_medusa as medusa
from tests.heads.eagles import eagle, eagle3
from tests.models.chained import step
from tests.models.checkpoints import deepseek, glm4_moe, glm4_moe_lite, llama, mimo, mistral, qwen2_moe, qwen3
from tests.models.compressed_checkpoints import deepseek_v4
from tests.models.gemmas import SMALL, assistant, gemma4, gemma4_small
from tests.models.hybrids import nemotron_h, qwen3_5, qwen3_5_moe, qwen3_next
from tests.models.ling import ling
from tests.models.longcat import longcat
from tests.models.own_layouts import ernie, gpt_oss, mimo_v2, minimax_m2
from tests.models.sparse_checkpoints import deepseek_v32, glm_dsa
from tests.models.test_families import SEVERAL_BLOCKS, Make
from tests.ranks import Peer, on_ranks, thread_ranks
from tests.tiny import run
from tests.weights.gguf_files import as_gguf
from tests.weights.published import LAYOUTS, converted, write

Logits = dict[Thread, list[Tensor]]
MTP = SpecConfig(speculative_algorithm="NEXTN", speculative_num_steps=2, speculative_adaptive=False)
TREE = SpecConfig(
    speculative_algorithm="NEXTN",
    speculative_num_steps=2,
    speculative_eagle_topk=2,
    speculative_num_draft_tokens=4,
    speculative_adaptive=False,
)
PLAIN = SpecConfig(speculative_algorithm="none")
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4, "moe_intermediate_size": 24}
# The family, its config, the ranks, what drafts. The vocabulary of 24 tokens, or 26, is shared by 4.
CASES: dict[str, tuple[Make, dict[str, Any], int, SpecConfig]] = {
    "llama": (llama, {}, 2, PLAIN),
    "llama, fewer key heads than ranks, all biases, tied head": (
        llama,
        {"attention_bias": True, "tie_word_embeddings": True, "vocab_size": 26},
        4,
        PLAIN,
    ),
    "qwen2 moe": (qwen2_moe, {"vocab_size": 25}, 2, PLAIN),
    "qwen3": (qwen3, {"vocab_size": 25}, 4, PLAIN),
    "mimo": (mimo, {"vocab_size": 26}, 4, MTP),
    "mimo, tree, tied head": (mimo, {"tie_word_embeddings": True}, 2, TREE),
    "glm 4.5": (glm4_moe, {}, 2, TREE),
    "deepseek": (deepseek, {**HEADS, "vocab_size": 25}, 4, MTP),
    "deepseek, no q_a, no shared expert": (deepseek, {**HEADS, "q_lora_rank": None, "n_shared_experts": 0}, 2, TREE),
}
LONGCAT = {"num_attention_heads": 4, "expert_ffn_hidden_size": 24}
WIDE = {"moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 24}
LARGE = {"hidden_size": 128, "head_dim": 64, "intermediate_size": 256, "moe_intermediate_size": 256, "fp8": True, "num_key_value_heads": 4}
MORE: dict[str, tuple[Make, dict[str, Any], int, SpecConfig]] = {
    "ernie 4.5": (ernie, {"vocab_size": 25}, 2, MTP),
    "gpt-oss": (gpt_oss, {}, 4, PLAIN),
    "gpt-oss, mxfp4": (gpt_oss, {"mxfp4": True, "hidden_size": 96, "intermediate_size": 128}, 2, PLAIN),
    "minimax-m2, norms over the heads of all": (minimax_m2, {}, 2, PLAIN),
    "minimax-m2, a key head on two": (minimax_m2, {"intermediate_size": 24}, 4, PLAIN),
    "mistral, a window": (mistral, {"sliding_window": 6, "head_dim": 16}, 2, PLAIN),
    "gemma 4": (gemma4, {"num_key_value_heads": 1, "attention_bias": True}, 2, PLAIN),
    "gemma 4, small": (gemma4_small, {"vocab_size": 25, "vocab_size_per_layer_input": 25}, 4, PLAIN),
    "mimo-v2": (mimo_v2, {}, 2, MTP),
    "mimo-v2.5, chunks of several blocks": (mimo_v2, {**SEVERAL_BLOCKS, "moe_intermediate_size": 24}, 4, MTP),
    "step 3.5": (step, {}, 2, MTP),
    "step 3.5, experts of all in float8": (step, {"fp8": True, "hidden_size": 160, "moe_intermediate_size": 136}, 2, PLAIN),
    "qwen3-next": (qwen3_next, {}, 2, TREE),
    "qwen3.5": (qwen3_5, {"tie_word_embeddings": True}, 2, MTP),
    "qwen3.5 moe": (qwen3_5_moe, {}, 2, MTP),
    "nemotron 3": (nemotron_h, {}, 2, MTP),
    "nemotron 3, latent experts, groups": (nemotron_h, {**WIDE, "moe_latent_size": 20, "n_groups": 4}, 4, MTP),
    "deepseek v3.2": (deepseek_v32, HEADS, 4, TREE),
    "glm 5.2": (glm_dsa, HEADS, 2, MTP),
    "glm 4.7 flash": (glm4_moe_lite, HEADS, 2, MTP),
    "longcat-flash": (longcat, LONGCAT, 2, MTP),
    "ling 2.0": (ling, {"use_qkv_bias": True}, 2, TREE),
    "deepseek v4": (deepseek_v4, {}, 2, MTP),
    "glm, float8 in whole blocks": (glm4_moe, LARGE, 2, MTP),
    "glm, float8 in parts of blocks": (glm4_moe, {"fp8": True, "hidden_size": 160}, 2, PLAIN),
}
CASES |= MORE
PROMPTS = [[token % 5 + i for token in range(n)] for i, n in enumerate((9, 17, 1))]
ASKED = [SamplingParams(max_tokens=9, temperature=0.6 * (i % 2), seed=i, ignore_eos=True) for i in range(len(PROMPTS))]


def config_of(directory: Path, spec: SpecConfig, backend: str = "auto", **model: Any) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(model=str(directory), device="cpu", dtype="float32", attention_backend=backend, **model),
        cache=CacheConfig(page_size=8, max_total_tokens=200),
        spec=spec,
        scheduler=SchedulerConfig(max_running_requests=4, chunked_prefill_size=14),
    )


@pytest.fixture
def logits(monkeypatch: pytest.MonkeyPatch) -> Logits:
    """Of each pass of a trunk and of its MTP layer, by the rank that computed it."""
    seen: Logits = {}
    monkeypatch.setattr("mtpserve.spec.cpu.draft_chain", one_by_one)  # nothing is heard of what one call does
    for kind in (DecoderModel, MTPHead):
        own = kind.logits

        def watched(self: Any, *given: Any, own: Any = own) -> Tensor:
            found: Tensor = own(self, *given)
            seen.setdefault(current_thread(), []).append(found)
            return found

        monkeypatch.setattr(kind, "logits", watched)
    return seen


def engine_of_rank(config: EngineConfig, ranks: Ranks, peers: ThreadPeers | None = None) -> Engine:
    planned = plan(config)
    model, arch, spread = load_part(planned, ranks, False, None), planned.described.arch, planned.described.spread
    engine = assemble(model, sizes_of(planned), replace(options_of(planned, [], None), poison=True))
    if peers is not None:
        assert spread is not None and arch.moe is not None
        spread.join(peers, arch.moe.latent or arch.hidden, arch.moe.top_k, torch.float32, planned.device)
        engine.ticks = Ticks(peers, spread.finish)
    return engine


def written(config: EngineConfig, ranks: Ranks) -> list[list[int]]:
    engine = engine_of_rank(config, ranks)
    texts = run(engine, PROMPTS, ASKED)
    assert engine.stats.draft_tokens_total > 0 or not config.spec.steps
    return texts


def compare(config: EngineConfig, size: int, logits: Logits, off: float = 3e-5, through: Sequence[Peer] = (), **parallel: Any) -> None:
    """`through`: what the ranks exchange numbers by, where that is not what threads have."""
    wanted = written(config, ALONE)
    divided = replace(config, parallel=ParallelConfig(tensor_parallel_size=size, **parallel))
    texts = on_ranks(through or thread_ranks(size), lambda rank: written(divided, rank))
    alone, *ranks = logits.values()
    assert len(ranks) == size and max(whole.std() for whole in alone) > 0.3
    for each in zip(*ranks, strict=True):
        assert all(torch.equal(part, each[0]) for part in each)
    assert all(text == texts[0] for text in texts)
    if not off:
        return
    assert texts[0] == wanted
    for whole, part in zip(alone, ranks[0], strict=True):
        torch.testing.assert_close(part, whole, rtol=1e-5, atol=off)


BY_RANK: dict[str, tuple[Make, dict[str, Any], int, SpecConfig, str]] = {
    "deepseek": (deepseek, HEADS, 4, MTP, "reference"),
    "deepseek, C++": (deepseek, HEADS, 2, TREE, "cpu"),
    "glm 4.5, whole panels, C++": (glm4_moe, {"moe_intermediate_size": 64}, 2, MTP, "cpu"),
    "gpt-oss, biases": (gpt_oss, {}, 4, PLAIN, "reference"),
    "gpt-oss, biases, C++": (gpt_oss, {}, 2, PLAIN, "cpu"),
    "gpt-oss, mxfp4": (gpt_oss, {"mxfp4": True, "hidden_size": 96, "intermediate_size": 128}, 2, PLAIN, "reference"),
    "glm, float8": (glm4_moe, LARGE, 2, MTP, "reference"),
    "nemotron 3, latent experts": (nemotron_h, {**WIDE, "moe_latent_size": 20}, 2, MTP, "auto"),
    "deepseek v4": (deepseek_v4, {}, 2, MTP, "auto"),
    "longcat-flash": (longcat, LONGCAT, 2, TREE, "auto"),
}


@pytest.mark.parametrize(("make", "options", "size", "spec", "backend"), BY_RANK.values(), ids=BY_RANK.keys())
def test_ranks_with_some_experts_each(
    tmp_path: Path, make: Make, options: dict[str, Any], size: int, spec: SpecConfig, backend: str, logits: Logits
) -> None:
    compare(config_of(make(tmp_path, **options).directory, spec, backend), size, logits, enable_expert_parallel=True)


def test_ranks_with_some_experts_each_have_no_more_of_them(tmp_path: Path) -> None:
    config = config_of(deepseek(tmp_path, **HEADS).directory, MTP)
    divided, spread = (fixed_weights(config, 4, expert_parallel_size=number) for number in (1, 4))
    assert divided == spread


@pytest.mark.parametrize(
    "case",
    [
        *("deepseek, C++", "nemotron 3, latent experts", "deepseek v4", "longcat-flash"),
        *(pytest.param(case, marks=pytest.mark.thorough) for case in ("deepseek", "gpt-oss, biases", "glm, float8")),
    ],
)
def test_ranks_of_engines_that_share_experts(tmp_path: Path, case: str) -> None:
    """Two engines, of which one has more to do, each of two ranks."""
    make, options, _, spec, backend = BY_RANK[case]
    config = config_of(make(tmp_path, **options).directory, spec, backend)
    wanted, tables = written(config, ALONE), [Table(2, patience=60.0) for _ in range(2)]
    divided = replace(config, parallel=ParallelConfig(data_parallel_size=2, tensor_parallel_size=2, enable_expert_parallel=True))
    texts: dict[tuple[int, int], list[list[int]]] = {}

    def work(number: int) -> None:
        replica, rank = divmod(number, 2)
        engine = engine_of_rank(replace(divided, replica=replica, rank=rank), of_engine[replica][rank], ThreadPeers(tables[rank], replica))
        mine = slice(2) if replica else slice(2, None)
        texts[replica, rank] = run(engine, PROMPTS[mine], ASKED[mine])
        engine.ticks.finish()

    of_engine = [thread_ranks(2) for _ in range(2)]
    together(4, work)
    assert texts[1, 0] + texts[0, 0] == texts[1, 1] + texts[0, 1] == wanted


@pytest.mark.parametrize(("make", "options", "size", "spec"), CASES.values(), ids=CASES.keys())
def test_the_ranks_are_the_whole_model(
    tmp_path: Path, make: Make, options: dict[str, Any], size: int, spec: SpecConfig, logits: Logits
) -> None:
    compare(config_of(make(tmp_path, **options).directory, spec), size, logits)


def test_matrices_in_float8_stay_so(tmp_path: Path, logits: Logits, caplog: pytest.LogCaptureFixture) -> None:
    """Those of which a rank has whole blocks."""
    config = config_of(glm4_moe(tmp_path, **LARGE).directory, MTP, "reference", quantization="fp8")
    compare(config, 2, logits)
    whole, part = (fixed_weights(config, size) for size in (1, 2))
    assert part < 0.6 * whole and not caplog.messages
    # Half of a block is no block.
    assert fixed_weights(config, 4) > 0.6 * part
    assert "--tensor-parallel-size 4: 22 matrices become torch.float32 (layers.0.attention.qkv.weight, …)" in caplog.text


def test_integers_of_four_bits_stay_so(tmp_path: Path, logits: Logits) -> None:
    tiny = gpt_oss(tmp_path, mxfp4=True, hidden_size=96, intermediate_size=128)
    compare(config_of(tiny.directory, PLAIN, "reference", quantization="int4"), 2, logits)


def test_groups_of_16_stay_so(tmp_path: Path, logits: Logits, caplog: pytest.LogCaptureFixture) -> None:
    """NVFP4: experts of 32 columns are cut into whole groups; each rank has the global scales of its rows."""
    tiny = glm4_moe(tmp_path / "source", hidden_size=64, head_dim=16, intermediate_size=96, moe_intermediate_size=32)
    config, writer = LAYOUTS["NVFP4"]
    quantised, _ = converted(tiny.tensors, lambda name: name.endswith("_proj.weight") and "eh_proj" not in name, writer)
    here = write(tmp_path / "here", tiny.config | {"quantization_config": config}, quantised)
    asked = config_of(here, MTP, "reference", quantization="int4")
    compare(asked, 2, logits)
    assert fixed_weights(asked, 2) < 0.7 * fixed_weights(asked, 1) and not caplog.messages


def test_int8_is_rounded_by_each_rank(tmp_path: Path, logits: Logits) -> None:
    """A row of a second matrix has a scale on each rank, so that the numbers are others."""
    compare(config_of(mimo(tmp_path).directory, MTP, "cpu", quantization="int8"), 2, logits, off=0)


def test_random_weights_are_those_of_one_model(tmp_path: Path, logits: Logits) -> None:
    tiny = deepseek(tmp_path, **HEADS, vocab_size=25)
    compare(config_of(tiny.directory, MTP, load_format="dummy"), 4, logits)


def test_a_gguf_file(tmp_path: Path, logits: Logits) -> None:
    tiny = as_gguf(qwen2_moe(tmp_path / "model"), tmp_path / "model.gguf")
    compare(config_of(tiny.directory, PLAIN), 2, logits)


def test_exact_in_plain_torch(tmp_path: Path, logits: Logits) -> None:
    config = config_of(glm4_moe(tmp_path).directory, replace(MTP, speculative_exact=True), "reference")
    compare(config, 2, logits)


def test_a_token_map_is_shared(tmp_path: Path, logits: Logits) -> None:
    tokens = tmp_path / "tokens.json"
    tokens.write_text(json.dumps([*range(3, 20)]))
    compare(config_of(mimo(tmp_path).directory, replace(MTP, speculative_token_map=str(tokens))), 2, logits)


@pytest.mark.parametrize("trunk", [{}, SMALL | {"num_key_value_heads": 2}], ids=["large", "small"])
def test_each_rank_computes_all_of_an_assistant_from_its_part_of_the_keys(tmp_path: Path, trunk: dict[str, Any], logits: Logits) -> None:
    pair = assistant(tmp_path / "assistant", gemma4(tmp_path / "target", **trunk), clusters=bool(trunk))
    spec = replace(MTP, speculative_draft_model_path=str(pair.directory))
    compare(config_of(pair.trunk.directory, spec), 2, logits)


@pytest.mark.parametrize("kind", ["STANDALONE", "EAGLE", "EAGLE3", "MEDUSA", "DFLASH"])
def test_each_rank_computes_all_of_a_draft_model_that_is_apart(tmp_path: Path, kind: str, logits: Logits) -> None:
    """EAGLE-3's is one for MiniMax-M2."""
    layers, path = 3 if kind == "DFLASH" else 7, tmp_path / "head"
    options = {"attn_type_list": None} if kind == "EAGLE3" else {}
    target = (minimax_m2 if kind == "EAGLE3" else llama)(tmp_path / "target", num_hidden_layers=layers, **options)
    match kind:
        case "STANDALONE":  # with its own sinks and biases, and as many heads as ranks do not share
            gpt_oss(path, vocab_size=24, num_attention_heads=3, num_key_value_heads=1)
        case "EAGLE":
            eagle(path, target, attention_bias=True)
        case "EAGLE3":
            eagle3(path, target, embedding=True, bias=True)
        case "MEDUSA":
            medusa.write(path, "authors")
        case "DFLASH":
            dflash.write(path, dflash.CONFIGS["sinks"])
    spec = SpecConfig(
        speculative_algorithm=kind, speculative_draft_model_path=str(path), speculative_num_steps=2, speculative_adaptive=False
    )
    compare(config_of(target.directory, spec), 2, logits)


@pytest.mark.parametrize("case", ["llama", "mimo", "glm 4.5", "deepseek", "gpt-oss"])
def test_whole_layers_sum_inside(tmp_path: Path, case: str, logits: Logits, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, through the memory that its ranks share."""
    pytest.importorskip("mtpserve_kernels.cpu.library")
    monkeypatch.setattr(cpu_kernels, "one_by_one", lambda *_: pytest.fail("layers one by one"))
    make, options, size, spec = CASES[case]
    memory, panels = mmap(-1, exchange_bytes(size)), {} if case in ("llama", "mimo", "gpt-oss") else {"moe_intermediate_size": 64}
    config = config_of(make(tmp_path, **{**options, **panels}).directory, spec, "cpu")
    compare(config, size, logits, through=[Exchange(memory, number, size, 60) for number in range(size)])


def test_a_number_of_ranks_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    config = replace(config_of(llama(tmp_path).directory, PLAIN), parallel=ParallelConfig(tensor_parallel_size=3))
    with pytest.raises(ConfigError, match=r"--tensor-parallel-size 3 does not fit this model's 4 attention heads; sizes that do: 1, 2, 4$"):
        plan(config)


def fixed_weights(config: EngineConfig, size: int, **parallel: Any) -> int:
    return dict(plan(replace(config, parallel=ParallelConfig(tensor_parallel_size=size, **parallel))).memory.rows)["weights"]
