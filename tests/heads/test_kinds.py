"""Which --speculative-algorithm a published draft model is for; what `mtpserve inspect DRAFT --model MODEL` says of the two."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from mtpserve.core.errors import ConfigError
from mtpserve.engine.startup.planning import plan
from mtpserve.heads.kinds import algorithm_of, require_kind
from mtpserve.tools.inspect import inspect_command as inspect
from tests.heads.test_standalone import config_of, drafted
from tests.models.checkpoints import deepseek, llama, write_nextn

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
LAYER = "layers.0.self_attn.q_proj.weight"
PUBLISHED: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "EAGLE, the authors'": ("EAGLE", LLAMA, ["fc.weight", "fc.bias", "embed_tokens.weight", LAYER]),
    "EAGLE, vLLM's": ("EAGLE", {"architectures": ["EagleLlamaForCausalLM"], "model_type": "eagle"}, ["model." + LAYER]),
    "EAGLE-3, the authors'": ("EAGLE3", LLAMA, ["fc.weight", "d2t", "midlayer.self_attn.q_proj.weight"]),
    "EAGLE-3, SpecForge's": ("EAGLE3", {"architectures": ["LlamaForCausalLMEagle3"]}, []),
    "EAGLE-3, speculators'": ("EAGLE3", {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3"}, [LAYER]),
    "Medusa, the authors'": ("MEDUSA", {"medusa_num_heads": 3, "medusa_num_layers": 1}, []),
    "Medusa, by tensors alone": ("MEDUSA", {}, ["0.0.linear.weight", "0.1.weight"]),
    "Medusa, vLLM's": ("MEDUSA", {"architectures": ["MedusaModel"], "model_type": "medusa"}, ["blocks.0.layers.0.weight"]),
    "DFlash": ("DFLASH", {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "dflash_config": {}}, ["fc.weight"]),
    "DFlash, by tensors alone": ("DFLASH", {"architectures": ["Qwen3ForCausalLM"]}, ["fc.weight", "hidden_norm.weight", LAYER]),
    "an MTP layer": ("NEXTN", {"architectures": ["DeepseekV3ForCausalLMNextN"]}, []),
    "an MTP layer with its old number": ("NEXTN", {"architectures": ["DeepseekV3ForCausalLM"]}, ["model.layers.61.eh_proj.weight"]),
    "a model": ("STANDALONE", LLAMA, ["model.embed_tokens.weight", "model." + LAYER]),
    "a model with an MTP layer": (
        "STANDALONE", {"architectures": ["DeepseekV3ForCausalLM"]}, ["model." + LAYER, "model.layers.1.eh_proj.weight"],
    ),
}  # fmt: skip


def publish(directory: Path, config: dict[str, Any], names: list[str]) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    if names:
        save_file({name: torch.zeros(1) for name in names}, directory / "model.safetensors")
    return directory


@pytest.mark.parametrize(("kind", "config", "names"), PUBLISHED.values(), ids=PUBLISHED)
def test_published_layouts_are_told_apart(tmp_path: Path, kind: str, config: dict[str, Any], names: list[str]) -> None:
    directory = publish(tmp_path / "draft", config, names)
    assert algorithm_of(directory) == kind
    require_kind(kind, directory)
    for other in ("EAGLE3", "MEDUSA", "DFLASH"):
        if other != kind:
            with pytest.raises(ConfigError, match=rf"--speculative-algorithm {other}: .*draft is .*, whose algorithm is {kind}"):
                require_kind(other, directory)


def test_what_nothing_tells_is_left_to_who_opens_it(tmp_path: Path) -> None:
    for directory in (tmp_path / "nowhere", publish(tmp_path / "empty", {}, []), publish(tmp_path / "pickles", LLAMA, [])):
        assert algorithm_of(directory) is None
        require_kind("EAGLE", directory)


def test_an_algorithm_for_another_kind_is_refused(tmp_path: Path) -> None:
    target, head = llama(tmp_path / "target").directory, publish(tmp_path / "head", LLAMA, ["fc.weight", "d2t"])
    with pytest.raises(ConfigError, match=r"--speculative-algorithm STANDALONE: .*head is an EAGLE-3 head, whose algorithm is EAGLE3"):
        plan(config_of(target, drafted(head)))


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert inspect.run(list(arguments)) == 0
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize("dummy", [False, True])
def test_a_pair_that_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str], dummy: bool) -> None:
    target, draft = str(llama(tmp_path / "target").directory), llama(tmp_path / "draft", num_hidden_layers=2)
    parameters = sum(tensor.numel() for tensor in draft.tensors.values())
    options = ("--model", target, "--context-length", "64", *(("--load-format", "dummy") if dummy else ()))
    lines = shown(capsys, str(draft.directory), *options, *(("--speculative-algorithm", "STANDALONE") if dummy else ()))
    kind = "draft model (llama, 2 layers of 48)"
    for line in (f"draft.kind {kind}", "draft.layers 2 x 2 heads x 12", f"draft.tensors {draft.directory}: *"):
        assert line in lines
    # Its parameters are counted in a group of their own, and in no other.
    assert any(line.startswith(kind) and f" {parameters:,} " in line for line in lines)
    alone = shown(capsys, *options)
    for group in ("attention", "feed-forward", "norms"):
        assert [line for line in lines if line.startswith(group)] == [line for line in alone if line.startswith(group)]
    asked = f"--speculative-algorithm STANDALONE --speculative-draft-model-path {draft.directory}"
    assert f"note: {kind} fits this model: {asked}" in lines and any(line.startswith(f"weights, {kind}") for line in lines)


def test_a_pair_that_does_not_fit(tmp_path: Path) -> None:
    target, other = str(llama(tmp_path / "target").directory), llama(tmp_path / "other", vocab_size=25).directory
    with pytest.raises(ConfigError, match="vocab_size is 25, and the model's is 24"):
        inspect.run([str(other), "--model", target])
    with pytest.raises(ConfigError, match="head is an EAGLE head, not a model: name the model that it drafts for with --model"):
        inspect.run([str(publish(tmp_path / "head", LLAMA, ["fc.weight"]))])
    with pytest.raises(ConfigError, match="cannot be recognized from its config and tensors: name it with --speculative-algorithm"):
        inspect.run([str(publish(tmp_path / "unknown", {}, [])), "--model", target])


def test_an_mtp_layer_that_was_published_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny = deepseek(tmp_path / "target")
    nextn = write_nextn(tmp_path / "nextn", tiny, 0)
    lines = shown(capsys, str(nextn), "--model", str(tiny.directory))
    assert "mtp.tensors model.layers.0.*" in lines and "draft.kind" not in " ".join(lines)
