"""`mtpserve bench cache`: from a trace to a table, and what is said of options that make no sense."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mtpserve.cli.options import all_options
from mtpserve.core.errors import ConfigError
from mtpserve.runtime.memory import SHARE_OF_CONTEXT, concurrency
from mtpserve.tools.bench import bench
from mtpserve.tools.simulate import bench_cache
from tests.house.tree import ROOT

TURNS = [{"timestamp": 2000 * i, "input_length": 1024 + 100, "output_length": 8, "hash_ids": [2 * (i % 4), 2 * (i % 4) + 1, 90 + i]}
         for i in range(12)]  # fmt: skip


@pytest.fixture
def trace(tmp_path: Path) -> str:
    file = tmp_path / "trace.jsonl"
    file.write_text("".join(json.dumps(turn) + "\n" for turn in TURNS))
    return str(file)


def results(tmp_path: Path, *arguments: str) -> list[dict[str, object]]:
    out = tmp_path / "out.json"
    assert bench.run(["cache", *arguments, "--output-file", str(out)]) == 0
    pools: list[dict[str, object]] = json.loads(out.read_text())["pools"]
    return pools


def test_a_row_for_each_size(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small, large = results(tmp_path, "--trace", trace, "--pool-tokens", "2000,20_000", "--context-length", "4096")
    # Four prompts take turns: the small pool has forgotten each before it comes again, the large one finds its first 1024 tokens.
    assert (small["hit_rate"], small["ideal_hit_rate"]) == (0, round(8 * 1024 / (12 * 1124), 6))
    assert (large["hit_rate"], large["cached_tokens"]) == (large["ideal_hit_rate"], 8 * 1024)
    assert small["pool_bytes"] == 2000 * 131_072 and large["requests"] == 12
    out = capsys.readouterr().out
    assert out.startswith(f"{trace}: 12 requests") and "hit rate" in out and "60.7%" in out and "no measurement" in out


def test_faster_devices_answer_sooner(trace: str, tmp_path: Path) -> None:
    rows = [results(tmp_path, "--trace", trace, "--pool-tokens", "20000", "--device-profile", name)[0] for name in ("b200", "h200", "cpu")]
    times = [row["ttft_ms"]["p50"] for row in rows]  # type: ignore[index]
    assert times == sorted(times) and times[0] > 1
    [row] = results(
        tmp_path, "--trace", trace, "--pool-tokens", "20000", "--bandwidth", "1e15", "--flops", "1e18", "--step-overhead-ms", "7"
    )
    assert row["tpot_ms"]["p50"] == pytest.approx(7, abs=0.1)  # type: ignore[index]


def test_a_steps_tokens_are_the_devices(trace: str, tmp_path: Path) -> None:
    """Unless they are given: prompts of 1,124 tokens take a step of a GPU's server."""
    steps = [
        results(tmp_path, "--trace", trace, "--pool-tokens", "20000", "--no-enable-prefix-caching", *more)[0]["steps"]
        for more in ([], ["--chunked-prefill-size", "2048"], ["--chunked-prefill-size", "512"], ["--device-profile", "cpu"])
    ]
    assert steps[0] == steps[1] < steps[2] <= steps[3]  # type: ignore[operator]


def test_options_of_the_server_mean_the_same_here(trace: str, tmp_path: Path) -> None:
    config = tmp_path / "server.yaml"
    config.write_text("max-total-tokens: 20000\nport: 1234\nmax-num-seqs: 3\nmax-model-len: 4096\n")
    [row] = results(tmp_path, "--trace", trace, "--config", str(config))
    assert (row["pool_tokens"], row["max_running_requests"]) == (20000, 3) and row["cached_tokens"]
    [row] = results(tmp_path, "--trace", trace, "--config", str(config), "--no-enable-prefix-caching")
    assert (row["cached_tokens"], row["ideal_hit_rate"]) == (0, 0)
    [deep] = results(tmp_path, "--trace", trace, "--config", str(config), "--speculative-algorithm", "MTP")
    assert deep["steps"] < row["steps"]  # type: ignore[operator]


def test_host_memory_and_disk_keep_what_the_pool_forgets(trace: str, tmp_path: Path) -> None:
    pool = ["--trace", trace, "--pool-tokens", "2000", "--context-length", "4096"]
    none, some, much = results(tmp_path, *pool, "--host-gib", "0,0.25,1")
    assert (none["hit_rate"], none["host_bytes"]) == (0, 0)
    assert 0 < some["hit_rate"] < some["ideal_hit_rate"]  # type: ignore[operator]
    assert much["hit_rate"] == much["ideal_hit_rate"] and much["host_bytes"] == 1 << 30
    assert much["ttft_ms"]["p50"] < none["ttft_ms"]["p50"]  # type: ignore[index]
    [disk] = results(tmp_path, *pool, "--kv-offload-dir", str(tmp_path / "pages"))
    assert disk["hit_rate"] == disk["ideal_hit_rate"] and not (tmp_path / "pages").exists()
    [slow] = results(tmp_path, *pool, "--host-gib", "1", "--host-bandwidth", "1e9")
    assert slow["ttft_ms"]["p50"] > much["ttft_ms"]["p50"]  # type: ignore[index]


def test_a_model_says_what_its_tokens_take(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [row] = results(tmp_path, "--trace", trace, "--pool-tokens", "20000", "--model", "demo", "--speculative-algorithm", "none")
    assert row["pool_bytes"] == 20000 * 6 * 576 * 2
    shown = capsys.readouterr().out
    assert "demo; 6,912 bytes of KV per token" in shown and "note: plain decoding" in shown
    [row] = results(tmp_path, "--trace", trace, "--pool-tokens", "20000", "--model", "demo")
    assert row["pool_bytes"] == 20000 * 7 * 576 * 2 and "note: MTP drafts, 3 deep" in capsys.readouterr().out, "as a server would"
    [row] = results(tmp_path, "--trace", trace, "--pool-tokens", "20000", "--model", "demo", "--speculative-algorithm", "MTP",
                    "--kv-cache-dtype", "fp8")  # fmt: skip
    assert row["pool_bytes"] == 20000 * 7 * 576


def test_texts_are_counted_by_the_models_tokenizer(tmp_path: Path) -> None:
    file = tmp_path / "shared.json"
    file.write_text(
        json.dumps([{"conversations": [{"from": "human", "value": "def f():\n    return 1\n"}, {"from": "gpt", "value": "f()"}]}])
    )
    by_model, by_characters = (
        results(tmp_path, "--trace", str(file), "--pool-tokens", "4000", "--context-length", "1000", *more)[0]
        for more in (["--model", "demo"], [])
    )
    assert by_characters["prompt_tokens"] == 6 != by_model["prompt_tokens"]


def test_what_is_too_long_is_said(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.run(["cache", "--trace", trace, "--pool-tokens", "1000"]) == 0
    assert "12 requests were too long for 1,000 tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ([], "--pool-tokens says how many tokens"),
        (["--pool-tokens", "10"], "--pool-tokens must be whole numbers of at least 16"),
        (["--pool-tokens", "1e6"], "--pool-tokens must be whole numbers"),
        (["--pool-tokens", "2000", "--num-speculative-tokens", "2"], "--speculative-num-steps needs something that drafts"),
        (["--pool-tokens", "20", "--spec-method", "MTP"], "--pool-tokens must be at least"),
        (["--pool-tokens", "2000", "--host-gib", "1,-1"], "--host-gib must be numbers of GiB"),
        (["--pool-tokens", "2000", "--host-gib", "much"], "--host-gib must be numbers of GiB"),
        (["--pool-tokens", "2000", "--request-rate", "0"], "--request-rate must be above 0"),
        (["--pool-tokens", "2000", "--think-time", "-1"], "--think-time must be at least 0"),
        (["--pool-tokens", "2000", "--device-profile", "abacus"], "h200"),
        (["--pool-tokens", "2000", "--spec-method", "MTP", "--max-num-batched-tokens", "3"], "--chunked-prefill-size must be at least"),
        (["--pool-tokens", "2000", "--output-file", "/nowhere/out.json"], "--output-file /nowhere/out.json: No such file"),
    ],
)
def test_errors(trace: str, more: list[str], what: str) -> None:
    with pytest.raises(ConfigError) as error:
        bench.run(["cache", "--trace", trace, *more])
    assert what in str(error.value)


def test_the_options_that_are_known_exist() -> None:
    names = {option.name for option in all_options(bench_cache.SECTIONS)}
    assert set(bench_cache.KNOWN) <= names


@pytest.mark.parametrize("pool", [300, 5000, 100_000])
def test_as_many_run_at_once_as_in_the_server(pool: int, trace: str, tmp_path: Path) -> None:
    [row] = results(tmp_path, "--trace", trace, "--pool-tokens", str(pool), "--context-length", "4096", "--num-prompts", "1")
    assert row["max_running_requests"] == concurrency(pool, 4096, 512) and SHARE_OF_CONTEXT == 8


def test_without_a_model_it_starts_without_torch(trace: str) -> None:
    code = f"""
import sys
from mtpserve.cli.main import main
assert main(["bench", "cache", "--trace", {trace!r}, "--pool-tokens", "2000"]) == 0
assert not {{"torch", "numpy", "transformers"}} & set(sys.modules)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
