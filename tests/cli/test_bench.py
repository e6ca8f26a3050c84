"""`mtpserve bench`: its benchmarks; and `bench serve`: what the peers' options mean, what is refused, exit codes."""

from __future__ import annotations

import asyncio
import json
import math
import shlex
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from mtpserve.cli.main import main
from mtpserve.core.errors import ConfigError
from mtpserve.tools.bench import bench
from mtpserve.tools.bench.serve import bench_serve
from mtpserve.tools.bench.serve.bench_peers import CHAT, COMPLETIONS, REFUSED
from mtpserve.tools.bench.serve.bench_serve_options import ServeBench, bench_of, parser
from tests.bench.fake import DONE, Handler, event, serving, stream


def options(*arguments: str) -> ServeBench:
    return bench_of(parser().parse(arguments))


def typed(line: str) -> ServeBench:
    return options(*shlex.split(line))


@contextmanager
def server(handler: Handler) -> Iterator[str]:
    """In a thread: the command has an event loop of its own."""
    loop, ready, ended = asyncio.new_event_loop(), threading.Event(), asyncio.Event()
    urls: list[str] = []

    async def serve() -> None:
        async with serving(handler) as url:
            urls.append(url)
            ready.set()
            await ended.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert ready.wait(10)
    try:
        yield urls[0]
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join()
        loop.close()


async def answer(request: web.Request) -> web.StreamResponse:
    asked = (await request.json())["max_tokens"]
    return await stream(request, *(event("x", i) for i in range(1, asked + 1)), event(usage=asked), DONE)


async def refusal(_: web.Request) -> web.Response:
    return web.Response(status=503, text="busy")


def test_the_benchmarks_exist(capsys: pytest.CaptureFixture[str]) -> None:
    for name, place in bench.BENCHMARKS.items():
        module, function = place.split(":")
        assert callable(getattr(import_module(module), function)) and import_module(module).parser().prog == f"mtpserve bench {name}"
    assert bench.HELP.keys() == bench.BENCHMARKS.keys()
    assert bench.run(["--help"]) == 0 and bench.run([]) == 2 and "serve" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="unknown benchmark 'sevre'; did you mean serve"):
        bench.run(["sevre"])


def test_a_command_for_sglangs_client_means_the_same() -> None:
    made = typed(
        "--backend sglang --dataset-name random --random-input 1024 --random-output 512 --num-prompt 30 --random-range-ratio 0.5 "
        """--host 10.0.0.1 --port 30001 --warmup-requests 2 --max-concurrency 8 --extra-request-body '{"min_p": 0.1}'"""
    )
    assert (made.target.base_url, made.target.endpoint, made.target.chat) == ("http://10.0.0.1:30001", "/v1/completions", False)
    assert made.target.body == {"temperature": 0, "ignore_eos": True, "min_p": 0.1}, "its answers have the length that is asked for"
    assert (made.dataset.random_input_len, made.dataset.random_output_len, made.dataset.num_prompts, made.dataset.warm) == (
        1024,
        512,
        30,
        2,
    )
    assert made.dataset.shrinks and made.dataset.random_range_ratio == 0.5 and "/generate" in made.notes[0]
    plain = options("--backend", "sglang-oai", "--disable-ignore-eos")
    assert plain.dataset.random_range_ratio == 0 and plain.dataset.random_output_len == 1024 and "ignore_eos" not in plain.target.body


def test_a_command_for_vllms_client_means_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    made = typed(
        "--backend vllm --model org/name --served-model-name short --dataset-name sharegpt --dataset-path f --num-prompts 5 "
        "--request-rate 4 --burstiness 0.5 --goodput ttft:500 tpot:20 --metric-percentiles 50,99 --percentile-metrics ttft,tpot "
        "--num-warmups 3 --top-k 5 --top-p 0.9 --header a=b c=d=e --metadata x=y --seed 7"
    )
    assert made.target.base_url == "http://127.0.0.1:8000" and made.target.model == "short"
    assert made.target.body == {"temperature": 0, "top_p": 0.9, "top_k": 5}
    assert made.target.headers == {"Authorization": "Bearer secret", "a": "b", "c": "d=e"} and made.metadata == {"x": "y"}
    assert made.summary.goodput == {"ttft": 0.5, "tpot": 0.02} and made.summary.percentiles == (50, 99) and made.summary.open_loop
    assert (made.metrics, made.dataset.warm, made.dataset.seed, made.dataset.shrinks) == (("ttft", "tpot"), 3, 7, False)


def test_urls_and_endpoints() -> None:
    assert options("--base-url", "https://x/v1/").target.base_url == "https://x"
    chat = options("--backend", "openai-chat", "--endpoint", "v1/chat/completions").target
    assert chat.chat and chat.endpoint == "/v1/chat/completions"
    assert all(options("--backend", name).target.chat is (name in CHAT) for name in (*COMPLETIONS, *CHAT))


def test_sweeps() -> None:
    made = options("--sweep", "max_concurrency=1,2,8")
    assert (made.swept, made.loads, made.summary.open_loop) == ("max-concurrency", (1, 2, 8), False)
    rates = options("--sweep", "request-rate=0.5,inf")
    assert (rates.swept, rates.loads, rates.summary.open_loop) == ("request-rate", (0.5, math.inf), True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num-prompts", "0"], "--num-prompts must be at least 1, got 0"),
        (["--random-input-len", "-3"], "--random-input-len must be at least 1, got -3"),
        (["--request-rate", "0"], "--request-rate must be above 0, got 0.0"),
        (["--burstiness", "inf"], "--burstiness must be above 0, got inf"),
        (["--price-per-hour", "-1"], "--price-per-hour must be above 0"),
        (["--port", "70000"], "--port must be in [1, 65535], got 70000"),
        (["--goodput", "itl:3"], "--goodput must be ttft:MS, tpot:MS or e2el:MS, got 'itl:3'"),
        (["--goodput", "ttft:x"], "--goodput must be"),
        (["--metric-percentiles", "101"], "--metric-percentiles must be numbers from 0 to 100"),
        (["--percentile-metrics", "ttft,x"], "--percentile-metrics must be of ttft, tpot, itl, e2el"),
        (["--sweep", "rate=1"], "--sweep must be max-concurrency=X,X,... or request-rate=X,X,..., got 'rate=1'"),
        (["--sweep", "max-concurrency=1.5"], "--sweep must be"),
        (["--sweep", "request-rate="], "--sweep must be"),
        (["--sweep", "request-rate=1", "--request-rate", "3"], "--request-rate is what --sweep request-rate=1 varies"),
        (["--extra-body", "[]"], "--extra-request-body must be a JSON object, got '[]'"),
        (["--header", "a"], "--header must be NAME=VALUE, got 'a'"),
        (["--base-url", "x:1"], "--base-url must be http://HOST:PORT"),
        (["--endpoint", "/v1/chat/completions"], "does not fit --backend openai: use --backend openai-chat"),
        (["--backend", "trt"], "argument --backend"),
        (["--num-promts", "3"], "did you mean --num-prompts"),
    ],
)  # fmt: skip
def test_values_that_make_no_sense(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        options(*arguments)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_what_is_not_implemented_is_refused_with_advice() -> None:
    known = parser()._option_string_actions
    for name, advice in REFUSED.items():
        assert f"--{name}" not in known
        with pytest.raises(ConfigError) as error:
            bench_serve.run([f"--{name.replace('-', '_')}=1"])
        assert f"{name.replace('-', '_')} is not an option here: {advice}" in str(error.value)


@pytest.mark.parametrize(
    "more", [["--plot", "/none/a.png"], ["--output-file", "/none/x"], ["--save-result", "--result-dir", "/dev/null/x"]]
)
def test_files_are_checked_first(more: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"/none|/dev/null"):
        bench_serve.run(more)


ASKED = ["--dataset-name", "random-ids", "--num-prompts", "4", "--random-input-len", "9", "--random-output-len", "3"]


def test_a_run_and_its_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, folder, picture = tmp_path / "out.jsonl", tmp_path / "results", tmp_path / "a.svg"
    with server(answer) as url:
        arguments = [
            "--base-url",
            url,
            *ASKED,
            "--output-file",
            str(file),
            "--output-details",
            "--save-result",
            "--result-dir",
            str(folder),
        ]
        assert bench.run(["serve", *arguments, "--plot", str(picture), "--tag", "mine", "--metadata", "who=me"]) == 0
    [made] = map(json.loads, file.read_text().splitlines())
    assert made["completed"] == 4 and made["total_output_tokens"] == 12 and made["model_id"] == "fake" and made["who"] == "me"
    assert len(made["ttfts"]) == 4 and made["tokens_counted_by"] == {"usage": 4}
    [saved] = folder.iterdir()
    assert saved.name.startswith("mine-infqps-fake-") and json.loads(saved.read_text()) == made and picture.read_text().startswith("<?xml")
    out = capsys.readouterr().out
    assert "4 of 4 requests" in out and "random token ids below 1,000" in out and "acceptance" not in out
    assert "warning: no two prompts share anything" in out, "this server says that it has two tokens of each in its cache"


def test_a_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, loads = tmp_path / "out.jsonl", "max-concurrency=1,2,4"
    with server(answer) as url:
        assert bench.run(["serve", "--base-url", url, *ASKED, "--sweep", loads, "--output-file", str(file)]) == 0
    runs: list[dict[str, Any]] = [json.loads(line) for line in file.read_text().splitlines()]
    assert [run["max_concurrency"] for run in runs] == [1, 2, 4] and [run["seed"] for run in runs] == [0, 1, 2]
    assert all(run["max_concurrent_requests"] <= run["max_concurrency"] for run in runs)
    assert "by requests at once" in capsys.readouterr().out


def test_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    with server(refusal) as url:
        assert main(["bench", "serve", "--base-url", url, *ASKED]) == 1
        assert "HTTP 503" in (out := capsys.readouterr().out) and "busy" in out
        assert main(["bench", "serve", "--base-url", url, *ASKED, "--flush-cache"]) == 1
        assert "neither /flush_cache nor" in capsys.readouterr().err
    assert main(["bench", "serve", "--port", "1", *ASKED, "--ready-check-timeout-sec", "0.01"]) == 1
    assert capsys.readouterr().err.startswith("mtpserve: no server is ready at http://127.0.0.1:1: Connection refused")
    assert main(["bench", "serve", "--port", "1", *ASKED, "--ready-check-timeout-sec", "0"]) == 1
    assert "cannot connect" in capsys.readouterr().out, "nobody has looked whether it is there"
    assert main(["bench", "serve", "--num-prompts", "x"]) == 2


def test_without_aiohttp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    with pytest.raises(ConfigError, match=r"mtpserve bench serve needs aiohttp, and it is not installed: pip install 'mtpserve\[bench\]'"):
        bench_serve.run(ASKED)
