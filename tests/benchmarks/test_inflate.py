"""An inflated checkpoint computes what the small one does: its logits, of trunk and drafts, are the small one's in transformers' code."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from mtpserve.config import CacheConfig, EngineConfig, ModelConfig, SpecConfig
from mtpserve.core.request import Request
from mtpserve.core.sampling import SamplingParams
from mtpserve.engine.startup.build import build_engine
from mtpserve.weights.checkpoint.checkpoint import Checkpoint
from tests import selection
from tests.models.checkpoints import Tiny, deepseek, glm4_moe, glm4_moe_lite, llama, mimo, qwen2, qwen2_moe, qwen3, qwen3_moe
from tests.models.harness import Harness
from tests.models.hybrids import qwen3_5, qwen3_5_moe, qwen3_next
from tests.models.own_layouts import ernie, gpt_oss, mimo_v2
from tests.models.sparse_checkpoints import deepseek_v32, glm_dsa
from tests.spec.test_mtp_rounds import Round, listen

ROOT = Path(__file__).parents[2]
GROUPED = {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 2, "routed_scaling_factor": 1.5}


@pytest.fixture
def inflate(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmarks' module `common.inflate`."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from common import inflate

    return inflate


def made_larger(inflate: Any, tiny: Tiny, out: Path, **larger: int) -> Path:
    inflate.inflate(tiny.directory, out, replace(inflate.Shape.of(tiny.config), **larger))
    return out


Make = Callable[[Path], Tiny]
HEADS = {"heads": 8, "kv_heads": 4}
WIDE = {"layers": 5, "hidden": 192, "inner": 100, "vocab": 40}
CASES: dict[str, tuple[Make, dict[str, int]]] = {
    "mimo": (mimo, WIDE | HEADS),
    "mimo, tied head, no biases": (lambda d: mimo(d, tie_word_embeddings=True), WIDE),
    "mimo, any width": (mimo, {"hidden": 80}),
    "deepseek": (lambda d: deepseek(d, n_shared_experts=2), WIDE | {"heads": 5, "kv_heads": 5, "expert_inner": 32}),
    "without q_lora": (lambda d: deepseek(d, q_lora_rank=None), WIDE | {"heads": 4, "kv_heads": 4}),
    "further layers alone": (lambda d: deepseek(d, first_k_dense_replace=2), {"layers": 6}),
    "all dense": (lambda d: deepseek(d, first_k_dense_replace=4), WIDE),
    "any width": (deepseek, {"hidden": 80}),
    "spare experts": (lambda d: deepseek(d, **GROUPED), {"experts": 16, "hidden": 192}),
    "clones in groups": (lambda d: deepseek(d, **GROUPED), {"experts": 32, "experts_per_token": 4, "layers": 4}),
    "clones, spare ones too": (lambda d: deepseek(d, **GROUPED), {"experts": 48, "experts_per_token": 6, "hidden": 192}),
    "clones without groups": (deepseek, {"experts": 19, "experts_per_token": 6, "layers": 4}),
    "llama, tied": (lambda d: llama(d, tie_word_embeddings=True), WIDE),
    "qwen2": (lambda d: qwen2(d, use_sliding_window=True, sliding_window=8, max_window_layers=2), WIDE),
    "qwen3": (qwen3, WIDE | HEADS),
    "qwen2_moe": (qwen2_moe, WIDE | {"experts": 16, "experts_per_token": 6}),
    "qwen3_moe": (qwen3_moe, {"layers": 5, "hidden": 192, "experts": 16, "experts_per_token": 6, "expert_inner": 32}),
    "glm4_moe": (glm4_moe, WIDE | HEADS | {"experts": 20, "experts_per_token": 6}),
    "glm4_moe_lite": (glm4_moe_lite, WIDE | {"heads": 4, "kv_heads": 4}),
    "deepseek_v32": (deepseek_v32, WIDE | {"heads": 5, "kv_heads": 5, "experts": 12}),
    "glm_dsa": (glm_dsa, WIDE),
    "gpt_oss": (
        gpt_oss,
        HEADS | {"layers": 5, "hidden": 256, "experts": 20, "experts_per_token": 6, "expert_inner": 64},
    ),
    "ernie": (ernie, WIDE | {"experts": 16, "experts_per_token": 6, "expert_inner": 32}),
    "mimo_v2": (mimo_v2, WIDE | {"heads": 8, "kv_heads": 2, "layers": 6, "experts": 20, "experts_per_token": 6}),
    "qwen3_next": (qwen3_next, HEADS | {"layers": 6, "hidden": 192, "experts": 16, "experts_per_token": 6}),
    "qwen3_5, tied": (lambda d: qwen3_5(d, tie_word_embeddings=True), WIDE | HEADS | {"layers": 6}),
    "qwen3_5_moe with pictures": (lambda d: qwen3_5_moe(d, pictures=True), {"layers": 7, "hidden": 192, "expert_inner": 32, "vocab": 40}),
    "clones, weights as they are": (
        lambda d: deepseek(d, norm_topk_prob=False, routed_scaling_factor=0.5),
        {"experts": 16, "experts_per_token": 6},
    ),
}


@pytest.mark.parametrize(("make", "larger"), selection.every_nth(CASES, 2))
def test_the_function_is_the_same(inflate: Any, tmp_path: Path, make: Make, larger: dict[str, int]) -> None:
    tiny = make(tmp_path / "small")
    vocab = tiny.config["vocab_size"]
    directory = made_larger(inflate, tiny, tmp_path / "large", **larger)
    prompts = [torch.randint(vocab, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (23, 31)]
    for ids, got in zip(prompts, Harness(directory, prompts, 5).all_logits((64, 7)), strict=True):
        wanted = tiny.logits(ids)
        torch.testing.assert_close(got[:, :vocab], wanted, rtol=1e-4, atol=1e-4)
        assert got.argmax(-1).equal(wanted.argmax(-1)), "a further token has the largest logit"
    if tiny.mtp is None:
        return
    rounds, small = drafted(directory, prompts), drafted(tiny.directory, prompts)
    assert [(each.ids, each.drafts) for each in rounds] == [(each.ids, each.drafts) for each in small], "other drafts, or others accepted"
    for each in rounds:
        torch.testing.assert_close(each.logits[:, :vocab], tiny.draft_logits(each.ids, each.drafts), rtol=1e-4, atol=1e-4)


def drafted(directory: Path, prompts: list[list[int]], tokens: int = 9) -> list[Round]:
    """What the checkpoint drafts while it continues the prompts, one after the other."""
    engine = build_engine(
        EngineConfig(
            model=ModelConfig(model=str(directory), device="cpu", dtype="float32"),
            cache=CacheConfig(max_total_tokens=400),
            # By default a large draft head is rounded to int8, and a small one is not.
            spec=SpecConfig(
                speculative_algorithm="NEXTN",
                speculative_adaptive=False,
                speculative_num_steps=2,
                speculative_draft_model_quantization="none",
            ),
        )
    )
    listener = listen(engine)
    for i, prompt in enumerate(prompts):
        engine.add(Request(str(i), prompt, SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)))
        while engine.has_work:
            assert all(event.error is None for event in engine.step())
    return listener.rounds


def test_what_the_small_model_lacks_is_random_where_it_can_be(inflate: Any, tmp_path: Path) -> None:
    tiny = deepseek(tmp_path / "small", **GROUPED)
    directory = made_larger(inflate, tiny, tmp_path / "large", layers=6, hidden=192, heads=6, kv_heads=6, experts=16, expert_inner=40)
    tensors = load_file(directory / "model.safetensors")
    assert sum(int((t == 0).sum()) for n, t in tensors.items() if "embed" not in n) < 0.3 * sum(t.numel() for t in tensors.values())
    assert json.loads((directory / "config.json").read_text())["rms_norm_eps"] == 1e-5


def test_several_files(inflate: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = mimo(tmp_path / "small")
    one = Checkpoint.open(made_larger(inflate, tiny, tmp_path / "one", layers=4))
    monkeypatch.setattr(inflate, "SHARD", 100_000)
    several = Checkpoint.open(made_larger(inflate, tiny, tmp_path / "several", layers=4))
    assert len({entry.file for entry in several.tensors.values()}) > 2
    assert one.tensors.keys() == several.tensors.keys()
    assert all(one.tensor(name).equal(several.tensor(name)) for name in one.tensors)


def test_the_demo_model(inflate: Any, tmp_path: Path) -> None:
    demo = ROOT / "mtpserve" / "demo"
    shape = inflate.Shape.of(json.loads((demo / "config.json").read_text()))
    larger = replace(shape, layers=7, hidden=1024, heads=3, kv_heads=3, experts=24, experts_per_token=4, expert_inner=128)
    inflate.inflate(demo, tmp_path / "large", larger)
    encode = Tokenizer.from_file(str(demo / "tokenizer.json")).encode
    prompts = [encode(text).ids for text in ("import os\n\ndef read_lines(path):\n", "class Stack:\n    def push(self, item):\n")]
    trunk, large_trunk = (Harness(each, prompts, 16).all_logits((64, 9)) for each in (demo, tmp_path / "large"))
    drafts, large_drafts = (drafted(each, prompts, tokens=24) for each in (demo, tmp_path / "large"))
    torch.testing.assert_close(large_trunk, trunk, rtol=1e-4, atol=1e-4)
    assert [(each.ids, each.drafts) for each in large_drafts] == [(each.ids, each.drafts) for each in drafts]
    assert len(drafts) < 36, "hardly a draft is accepted"
    torch.testing.assert_close([each.logits for each in large_drafts], [each.logits for each in drafts], rtol=1e-4, atol=1e-4)


def test_the_named_shapes_hold_the_trained_model(inflate: Any) -> None:
    import trained

    size = trained.SMALL
    for shape in inflate.SHAPES.values():
        inflate.check(inflate.Shape(size.layers, size.hidden, size.inner, size.heads, size.kv_heads, size.vocab), shape)


REFUSED = {
    "--hidden must be at least the small model's 48, got 40": {"hidden": 40},
    "nothing would be larger": {},
    "6 heads over 2 are not grouped as 4 over 2": {"heads": 6},
    "--experts 4: the model has no experts": {"experts": 4},
    "--experts-per-token must be a multiple of 2, got 3": {"experts_per_token": 3, "experts": 32},
    "--experts must be at least 24, 3 clones of each, got 20": {"experts_per_token": 6, "experts": 20},
    "--experts must be a multiple of 8, the number of groups, got 20": {"experts_per_token": 4, "experts": 20},
}


@pytest.mark.parametrize("text", REFUSED)
def test_shapes_that_cannot_hold_the_model_are_refused(inflate: Any, tmp_path: Path, text: str) -> None:
    made = deepseek(tmp_path / "small", **GROUPED) if "must be" in text and "hidden" not in text else mimo(tmp_path / "small")
    with pytest.raises(SystemExit) as raised:
        made_larger(inflate, made, tmp_path / "large", **REFUSED[text])
    assert text in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("make", [qwen3_moe, ernie])
def test_a_router_that_no_bias_decides_has_no_spare_experts(inflate: Any, tmp_path: Path, make: Make) -> None:
    with pytest.raises(SystemExit, match="--experts must be 16, 2 clones of each, got 20: no bias keeps this router from further ones"):
        made_larger(inflate, make(tmp_path / "small"), tmp_path / "large", experts=20, experts_per_token=6)


def test_checkpoints_that_cannot_be_enlarged_are_refused(inflate: Any, tmp_path: Path) -> None:
    tiny = deepseek(tmp_path / "float8", fp8=True, hidden_size=160, intermediate_size=200, kv_lora_rank=132)
    with pytest.raises(SystemExit, match=r"is stored as F8_E4M3: expand it"):
        made_larger(inflate, tiny, tmp_path / "large", layers=4)
    tiny = mimo(tmp_path / "other")
    save_file(tiny.tensors | {"model.layers.0.extra": torch.zeros(1)}, tiny.directory / "model.safetensors")
    (tiny.directory / "model.safetensors.index.json").unlink()
    with pytest.raises(SystemExit, match=r"extra: the model has no parameter for this tensor"):
        made_larger(inflate, tiny, tmp_path / "large", layers=4)
    for architecture, told in (("DeepseekV3ForCausalLMNextN", "an MTP layer without a trunk"), ("GPT2LMHeadModel", "is not supported")):
        (tiny.directory / "config.json").write_text(json.dumps(tiny.config | {"architectures": [architecture]}))
        with pytest.raises(SystemExit, match=told):
            made_larger(inflate, tiny, tmp_path / "large", layers=4)


def test_the_command_line(inflate: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    tiny = mimo(tmp_path / "small")
    monkeypatch.setattr("sys.argv", ["inflate.py", str(tiny.directory), str(tmp_path / "large"), "--heads", "8", "--hidden", "192"])
    inflate.main()
    assert capsys.readouterr().out.endswith("M parameters\n")
    config = json.loads((tmp_path / "large" / "config.json").read_text())
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (8, 4, 12)
