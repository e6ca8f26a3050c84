"""Against our own server with the bundled model: the counts are the server's, and acceptance is that of its counters."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from mtpserve.config import ModelConfig
from mtpserve.tools.bench import bench
from mtpserve.tools.bench.exported import ServerCounters, read_counters
from tests.server.test_end_to_end import Running, running

DEMO = ModelConfig().directory


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running("--chat-template", "mtpserve/demo/comments.jinja") as started:
        yield started


def counters(server: Running) -> ServerCounters:
    found = read_counters(httpx.get(server.url + "/metrics").text)
    assert found is not None
    return found


def run(server: Running, out: Path, *arguments: str) -> dict[str, Any]:
    out.unlink(missing_ok=True)
    common = ["--base-url", server.url, "--output-file", str(out), "--output-details", "--disable-tqdm", "--ignore-eos"]
    assert bench.run(["serve", *common, *arguments]) == 0
    made: dict[str, Any] = json.loads(out.read_text())
    assert made["failed"] == 0
    return made


def test_counts_and_acceptance_are_the_servers(server: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    httpx.post(server.url + "/v1/completions", json={"prompt": "import os", "max_tokens": 40}, timeout=60)  # no part of the run
    before = counters(server)
    lengths = ("--random-input-len", "40", "--random-output-len", "24", "--num-prompts", "6", "--warmup-requests", "0")
    made = run(server, tmp_path / "out.jsonl", *lengths, "--max-concurrency", "3")
    after = counters(server).since(before)
    assert (made["completed"], made["total_input_tokens"], made["total_output_tokens"]) == (6, 6 * 40, 6 * 24)
    assert made["input_lens"] == [40] * 6 and made["output_lens"] == [24] * 6 and made["tokens_counted_by"] == {"usage": 6}
    assert (after.prompt, after.generated) == (240, 144) == (made["counted_prompt_tokens"], made["counted_output_tokens"])
    assert made["accept_length"] == after.length is not None and made["spec_decode_num_drafts"] == after.verifications
    assert made["spec_decode_per_position_acceptance_rates"] == list(after.rates_at) and len(after.rates_at) == 3
    assert made["prompt_tokens_against_intended"]["differ"] == 0
    # Drafts were accepted: chunks have several tokens, and there is a latency for each token after the first chunk's.
    assert max(max(each) for each in made["tokens_in_chunks"]) > 1
    assert [len(gaps) for gaps in made["itls"]] == [24 - chunks[0] for chunks in made["tokens_in_chunks"]]
    assert made["max_concurrent_requests"] <= 3 and "mtpserve's counters" in capsys.readouterr().out


def test_chat_has_the_tokens_that_were_meant(server: Running, tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    for file in DEMO.glob("*.json"):
        shutil.copy(file, tokenizer)
    shutil.copy(DEMO / "comments.jinja", tokenizer / "chat_template.jinja")  # the server has it, too
    sizes = "--random-input-len", "30", "--random-output-len", "8", "--num-prompts", "2"
    made = run(server, tmp_path / "out", "--backend", "openai-chat", "--tokenizer", str(tokenizer), *sizes)
    assert made["input_lens"] == [30, 30] and made["output_lens"] == [8, 8]


def test_groups_are_found_in_the_cache(server: Running, tmp_path: Path) -> None:
    sizes = ("--gsp-num-groups", "1", "--gsp-prompts-per-group", "3", "--gsp-system-prompt-len", "64", "--gsp-question-len", "16")
    asked = ("--dataset-name", "generated-shared-prefix", *sizes, "--gsp-output-len", "4", "--max-concurrency", "1", "--flush-cache")
    made = run(server, tmp_path / "out", *asked)
    assert made["total_cached_tokens"] == made["cached_prompt_tokens"] == 2 * 64 and made["total_input_tokens"] == 240


def test_categories_and_turns(server: Running, tmp_path: Path) -> None:
    file = tmp_path / "questions.jsonl"
    questions = [{"category": "code", "turns": ["import os\n", "def f():\n"]}, {"category": "text", "turns": ["# a comment\n"]}]
    file.write_text("".join(json.dumps(each) + "\n" for each in questions))
    asked = ("--dataset-name", "spec-bench", "--dataset-path", str(file), "--spec-bench-output-len", "12", "--warmup-requests", "0")
    made = run(server, tmp_path / "out", *asked)
    assert [(each["category"], each["requests"], each["output_tokens"]) for each in made["categories"]] == [
        ("code", 2, 24),
        ("text", 1, 12),
    ]
    assert all(each["tokens_per_step"] > 1 and 0 <= each["acceptance_rate"] <= 1 for each in made["categories"])
    first, second, _ = made["input_lens"]
    assert second > first + 12, "the second turn has the first and its answer before it"


def test_a_prompt_of_ids_and_no_stream(server: Running, tmp_path: Path) -> None:
    lengths = ("--random-input-len", "20", "--random-output-len", "6", "--num-prompts", "3", "--request-rate", "50")
    made = run(server, tmp_path / "out", "--dataset-name", "random-ids", *lengths, "--disable-stream")
    assert made["input_lens"] == [20] * 3 and made["output_lens"] == [6] * 3
    assert "mean_ttft_ms" not in made and made["mean_e2el_from_planned_ms"] >= made["mean_e2el_ms"] > 0 and made["max_lateness_ms"] >= 0
