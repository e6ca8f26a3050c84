"""`mtpserve inspect`: what is printed of a report that the test made up."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from mtpserve.config import EngineConfig
from mtpserve.core.arch.latent import MLAArch
from mtpserve.core.arch.model import Attention, KVLayout, ModelArch, MTPArch
from mtpserve.core.arch.rope import RopeArch
from mtpserve.core.errors import ConfigError
from mtpserve.spec.draft.token_map import TokenMap, make_token_map, read_token_map
from mtpserve.tools.inspect import inspect_command as inspect
from mtpserve.tools.inspect.checkpoint import InspectReport

ARCH = ModelArch(
    family="deepseek",
    layers=(*[Attention(KVLayout("mla", 1, 576, 512))] * 6, Attention(KVLayout("mla", 1, 576, 512), 1024)),
    hidden=256,
    vocab=4096,
    heads=2,
    head_dim=192,
    intermediate=512,
    rope=RopeArch(64, 1e4, True),
    norm_eps=1e-6,
    scale=0.1,
    max_positions=4096,
    tied_head=False,
    eos_ids=(1,),
    dtype="bfloat16",
    mla=MLAArch(128, 512, 128, 64, 128),
    mtp=MTPArch(1, "embedding-hidden", "post", "post"),
)
REPORT = InspectReport(
    arch=ARCH,
    mtp_prefix="model.layers.6.",
    weights=[("embedding", 1, 1_048_576, "bfloat16", 2_097_152), ("trunk", 200, 11_000_000, "bfloat16", 22_000_000)],
    memory=[("weights", 24_097_152), ("KV pool", 3 * 1024**3)],
    notes=["float32 on this CPU"],
)


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> list[EngineConfig]:
    configs: list[EngineConfig] = []

    def inspect_model(config: EngineConfig) -> InspectReport:
        configs.append(config)
        return REPORT

    monkeypatch.setattr("mtpserve.weights.checkpoint.hf.read_config", lambda directory: None)
    monkeypatch.setitem(sys.modules, "mtpserve.tools.inspect.checkpoint", SimpleNamespace(inspect_model=inspect_model))  # type: ignore[arg-type]
    return configs


def test_tables_in_a_pipe_are_plain_columns(capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect.run(["demo"]) == 0
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines()]
    for row in (
        ["family", "deepseek"],
        ["layers", "6", "x", "latent,", "576"],
        ["layers", "1", "x", "latent,", "576,", "window", "1,024"],
        ["mla.kv_rank", "512"],
        ["moe", "-"],
        ["mtp.fusion", "embedding-hidden"],
        ["mtp.tensors", "model.layers.6.*"],
        ["trunk", "200", "11,000,000", "bfloat16", "21.0", "MiB"],
        ["all", "201", "12,048,576", "23.0", "MiB"],
        ["KV", "pool", "3.0", "GiB"],
        ["note:", "float32", "on", "this", "CPU"],
    ):
        assert row in rows
    assert out.isascii()


def test_json_holds_the_whole_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect.run(["demo", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["arch"]["mla"]["kv_rank"], found["arch"]["moe"], found["mtp_prefix"]) == (512, None, "model.layers.6.")
    assert found["weights"][1] == {"group": "trunk", "tensors": 200, "parameters": 11_000_000, "dtype": "bfloat16", "bytes": 22_000_000}
    assert found["memory"][1] == {"what": "KV pool", "bytes": 3 * 1024**3}
    assert found["notes"] == ["float32 on this CPU"]


@pytest.mark.parametrize("arguments", [["/a"], ["--model", "/a"], ["--model-path=/a", "--json"]])
def test_the_model_may_be_named_either_way(arguments: list[str], asked: list[EngineConfig]) -> None:
    inspect.run([*arguments, "--page-size", "32"])
    assert (asked[0].model.model, asked[0].cache.page_size) == ("/a", 32)


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536, "1.5 KiB"), (5 * 1024**5, "5120.0 TiB")]
)
def test_sizes_for_people(size: int, text: str) -> None:
    assert inspect.human(size) == text


@pytest.mark.parametrize("model", [["/m"], ["--model", "/m"]])
def test_token_map_of_text_files(
    model: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[str, int, list[str]]] = []

    def token_map(config: EngineConfig, size: int, texts: list[str]) -> TokenMap:
        asked.append((config.model.model, size, texts))
        return make_token_map(Counter({1: 3, 2: 1}), size, 8, always=())

    monkeypatch.setattr(sys.modules["mtpserve.tools.inspect.checkpoint"], "token_map", token_map, raising=False)
    out = str(tmp_path / "map.json")
    assert inspect.run(["--token-map", out, "--token-map-size", "2", *model, "a.txt", "b.txt"]) == 0
    assert asked == [("/m", 2, ["a.txt", "b.txt"])]
    assert read_token_map(out, 8) == [1, 2]
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["1", "75.00%"] in rows and ["2", "100.00%", "written", "to", out] in rows


def test_text_files_and_token_map_need_each_other() -> None:
    with pytest.raises(ConfigError, match="--token-map needs text files"):
        inspect.run(["--token-map", "x.json", "/m"])
    with pytest.raises(ConfigError, match=r"with --token-map only, got 'a\.txt'"):
        inspect.run(["/m", "a.txt"])
