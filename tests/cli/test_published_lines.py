"""Published command lines of vLLM, SGLang and llama.cpp: each serves a tiny model of its family, or is refused with the way out."""

from __future__ import annotations

import asyncio
import re
import shlex
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from mtpserve.cli import launch
from mtpserve.cli.options import Settings, parsed_values, settings
from mtpserve.config import ModelConfig
from mtpserve.config.model import FORMATS
from mtpserve.core.errors import ConfigError
from mtpserve.core.request import Request, TokenEvent
from mtpserve.engine.engine import Engine
from mtpserve.engine.startup.build import build_engine
from mtpserve.engine.startup.storage import with_format
from mtpserve.server.app import create_app
from mtpserve.text.tokenizer import tokenizer_of
from mtpserve.weights.checkpoint.hf_config import HFConfig
from mtpserve.weights.checkpoint.hub import fetched
from tests.cli.published import REFUSED, RUNS, family_of, model_of, substituted, write_tiny
from tests.server.fake_client import FakeClient

Checkpoints = Callable[[str], Path]
BODY = {"prompt": "def read_lines(path):", "max_tokens": 5, "ignore_eos": True, "temperature": 0}


class EngineClient(FakeClient):
    """Serves an engine of the test's own process, for one request at a time."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.real, self.card = engine, engine.card

    async def submit(self, request: Request) -> AsyncIterator[list[TokenEvent]]:
        self.real.add(request)
        while self.real.has_work:
            if events := [event for event in self.real.step() if event.id == request.id]:
                yield events


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """Returns the path of the tiny checkpoint that stands in for a line's; lines of one family share it."""
    paths: dict[str, Path] = {}

    def path_of(line: str) -> Path:
        pattern = family_of(model_of(line))
        if pattern not in paths:
            paths[pattern] = write_tiny(pattern, tmp_path_factory.mktemp("tiny"))
        return paths[pattern]

    return path_of


def parse(words: Sequence[str]) -> Settings:
    return settings(parsed_values(launch.parser().parse(words)))


async def ask(http: httpx.AsyncClient, server: Any, names: Sequence[str]) -> dict[str, Any]:
    """Returns the answer to one request, with the last of the model's names and of the keys."""
    key = {"Authorization": f"Bearer {server.api_key[-1]}"} if server.api_key else {}
    if key:
        assert (await http.post("/v1/completions", json=BODY)).status_code == 401
    assert {model["id"] for model in (await http.get("/v1/models", headers=key)).json()["data"]} == set(names)
    answer = await http.post("/v1/completions", json=BODY | {"model": names[-1]}, headers=key)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


@pytest.mark.parametrize("line", RUNS)
def test_a_published_line_serves(line: str, checkpoints: Checkpoints) -> None:
    """It is parsed, the engine and the app are built as `mtpserve launch` builds them, in this process, and a request is answered."""
    config, server = parse(substituted(line, checkpoints(line), ranks=1))
    config = fetched(config)
    engine = build_engine(config)
    try:
        app = create_app(EngineClient(engine), tokenizer_of(config.model), config, server)

        async def use() -> dict[str, Any]:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
                return await ask(http, server, config.model.names)

        answer = asyncio.run(use())
    finally:
        engine.close()
    assert answer["usage"]["completion_tokens"] == BODY["max_tokens"]
    assert engine.card.speculative_steps == RUNS[line]
    assert (engine.card.algorithm is not None) == (RUNS[line] > 0)


@pytest.mark.thorough
@pytest.mark.parametrize("line", RUNS)
def test_a_published_line_starts_a_server(line: str, checkpoints: Checkpoints) -> None:
    """`mtpserve launch` in a process of its own, with two ranks or engines where the line has several."""
    words = substituted(line, checkpoints(line), ranks=2)
    command = [sys.executable, "-m", "mtpserve", "launch", *words, *([] if "--port" in words else ["--port", "0"])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stderr is not None
            ready = re.search(r"http\S+", process.stdout.readline())
            assert ready, process.stderr.read()
            server = parse(words).server
            names = parse(words).engine.model.names

            async def use() -> dict[str, Any]:
                async with httpx.AsyncClient(base_url=ready[0], timeout=60) as http:
                    return await ask(http, server, names)

            assert asyncio.run(use())["usage"]["completion_tokens"] == BODY["max_tokens"]
        finally:
            process.terminate()
            process.communicate(timeout=60)
    assert process.returncode == 0


@pytest.mark.parametrize("line", REFUSED)
def test_a_published_line_is_refused_with_the_way_out(line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(shlex.split(line))
    assert REFUSED[line] in str(caught.value) and "\n" not in str(caught.value)


def test_what_stands_in_for_gpus_is_said_in_one_place() -> None:
    """All that is changed in the table's lines: the model, numbers of GPUs, shares of memory, kernels, cores, addresses."""
    line = "org/DeepSeek-V3 -tp 8 --dp-size=4 --gpu-memory-utilization 0.9 --host 0.0.0.0 --port 80 --max-num-seqs 8 --kv-cache-dtype fp8"
    ours = substituted(line, Path("tiny"), ranks=2)
    assert " ".join(ours) == (
        "tiny -tp 2 --dp-size 2 --gpu-memory-utilization 0.05 --host 127.0.0.1 --port 0 --max-num-seqs 8 --kv-cache-dtype fp8"
    )


@pytest.mark.parametrize(("name", "method"), [("awq", "awq"), ("awq_marlin", "awq"), ("gptq_marlin", "gptq"), ("modelopt_fp8", "modelopt")])
def test_a_format_that_the_checkpoint_has_may_be_named(name: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtpserve.engine.startup.storage.quantization", lambda config: config.values["method"])
    engine = parse(["m", "--quantization", name]).engine
    config = HFConfig(Path("m/config.json"), {"method": method})
    assert with_format(engine, config) == replace(engine, model=ModelConfig(model="m"))
    assert with_format(parse(["m.gguf", "--quantization", "gguf"]).engine, config).model.quantization == "auto"
    assert name in FORMATS


MODELOPT, PACKED = {"quant_method": "modelopt"}, {"quant_method": "compressed-tensors"}
MIXED = {"quantized_layers": {"a": {"quant_algo": "FP8"}, "b": {"quant_algo": "NVFP4"}}}
HAVE_NVFP4: list[dict[str, Any]] = [MODELOPT | {"quant_algo": "NVFP4"}, MODELOPT | {"quant_algo": "MIXED_PRECISION"} | MIXED]
HAVE_NVFP4 += [PACKED | {"format": "nvfp4-pack-quantized"}, PACKED | {"config_groups": {"group_0": {"format": "nvfp4-pack-quantized"}}}]
HAVE_NONE: list[dict[str, Any]] = [MODELOPT | {"quant_algo": "FP8"}, PACKED | {"format": "float-quantized"}]


@pytest.mark.parametrize("section", HAVE_NVFP4 + HAVE_NONE, ids=str)
@pytest.mark.parametrize("name", ["nvfp4", "modelopt_fp4", "petit_nvfp4", "modelopt", "compressed-tensors"])
def test_nvfp4_may_be_named_where_it_is(name: str, section: dict[str, Any]) -> None:
    """The method has other formats, too."""
    engine, config = parse(["m", "--quantization", name]).engine, HFConfig(Path("m/config.json"), {"quantization_config": section})
    method = section["quant_method"]
    if name == method or (section in HAVE_NVFP4 and (name == "nvfp4" or method == "modelopt" != name != "compressed-tensors")):
        assert with_format(engine, config).model.quantization == "auto"
        return
    stored = f"{method} NVFP4" if section in HAVE_NVFP4 else method
    with pytest.raises(ConfigError, match=f"--quantization {name}: m has weights in the format {stored}: leave the option out"):
        with_format(engine, config)


@pytest.mark.parametrize("name", ["awq", "gptq", "modelopt", "bitsandbytes", "torchao", "quark"])
def test_another_format_is_refused_with_what_the_checkpoint_has(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtpserve.engine.startup.storage.quantization", lambda config: config.values["method"])
    engine = parse(["m", "--quantization", name]).engine
    for other, words in (("fp8", "has weights in the format fp8"), ("none", "has weights that are not quantised")):
        with pytest.raises(ConfigError, match=f"^--quantization {name}: m {words}: leave the option out, which reads them") as caught:
            with_format(engine, HFConfig(Path("m/config.json"), {"method": other}))
        assert ("--quantization int8" in str(caught.value)) == (other == "none")
