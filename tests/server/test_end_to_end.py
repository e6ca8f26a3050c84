"""The real server with the demo model: what a user types, many clients of whom a third leave, and what must be left afterwards."""

from __future__ import annotations

import asyncio
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import httpx
import openai
import pytest

from tests.server.metric_text import without_model

REQUESTS = 200


class Running:
    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process, self.url = process, url

    def metric(self, name: str) -> float:
        found = re.search(rf"^mtpserve_{re.escape(name)} (\S+)$", without_model(httpx.get(self.url + "/metrics").text), re.MULTILINE)
        assert found, name
        return float(found[1])

    def peak_bytes(self) -> int:
        """Of both processes."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        sizes = [Path(f"/proc/{pid}/status").read_text() for pid in (self.process.pid, *children)]
        return sum(1024 * int(found[1]) for status in sizes if (found := re.search(r"VmHWM:\s+(\d+) kB", status)))


@contextmanager
def running(*options: str, stderr: IO[str] | None = None) -> Iterator[Running]:
    """Its depth is fixed: what an adaptive one drafts depends on the machine's load, and its start takes seconds to measure steps."""
    command = [sys.executable, "-m", "mtpserve", "launch", "--model", "demo", "--speculative-algorithm", "NEXTN", "--port", "0"]
    command += ["--no-speculative-adaptive", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, cwd=Path(__file__).parents[2]) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"http://\S+", process.stdout.readline())
            assert found
            yield Running(process, found[0])
            process.terminate()
            # 120 is Python's way to say that something was left to write to a standard error that takes nothing.
            assert process.wait(timeout=20) in ((0,) if stderr is None else (0, 120))
        finally:
            process.kill()


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running() as started:
        yield started


def test_the_openai_client_streams_and_counts(server: Running) -> None:
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none")
    asked = {"model": "demo", "prompt": "import os\n\ndef read_lines(path):", "max_tokens": 48, "temperature": 0}
    whole = client.completions.create(**asked)  # type: ignore[call-overload]
    chunks = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))  # type: ignore[call-overload]
    assert "".join(c.choices[0].text for c in chunks if c.choices) == whole.choices[0].text != ""
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens <= 48
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(**asked | {"temperature": -1})  # type: ignore[call-overload]
    assert server.metric("spec_accepted_tokens_total") > 0


@pytest.mark.parametrize("fields", [
    {"max_tokens": 24},
    {"max_tokens": 64, "stop": ["\n"], "speculative": {"enabled": False}},
    {"max_tokens": 24, "regex": "[a-z_]{3,12}\\n"},
])  # fmt: skip
def test_the_best_of_several_are_those_with_the_likeliest_tokens(server: Running, fields: dict[str, Any]) -> None:
    def ask(**more: Any) -> Any:
        body = {"model": "demo", "prompt": "def read_", "temperature": 1, "seed": 7, "logprobs": 0} | fields | more
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def mean(choice: Any) -> float:
        return statistics.fmean(choice["logprobs"]["token_logprobs"])

    whole, best = ask(n=8), ask(n=3, best_of=8)
    ranked = sorted(whole["choices"], key=mean, reverse=True)
    assert len({choice["text"] for choice in ranked[:4]}) == 4 and mean(ranked[0]) > mean(ranked[3])
    assert [choice["text"] for choice in best["choices"]] == [choice["text"] for choice in ranked[:3]]
    assert [choice["index"] for choice in best["choices"]] == [0, 1, 2]
    for name in ("prompt_tokens", "completion_tokens"):
        assert best["usage"][name] == whole["usage"][name]


def test_a_prompt_is_computed_once_for_each_salt(server: Running) -> None:
    def ask(**fields: str) -> tuple[int, str]:
        prompt = "import os\n\n\ndef read_lines(path):\n    with open(path) as file:\n        return file.readlines()\n\n\n" * 3
        body = {"model": "demo", "prompt": prompt, "max_tokens": 32, "temperature": 0} | fields
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
        found, all_of_it = answer["usage"]["prompt_tokens_details"]["cached_tokens"], answer["usage"]["prompt_tokens"]
        assert 0 <= found < all_of_it
        return found, answer["choices"][0]["text"]

    httpx.post(f"{server.url}/flush_cache")
    none, text = ask()
    found, same = ask()
    assert none == 0 < found and text == same
    assert server.metric("cached_prompt_tokens_total") >= found and server.metric("kv_pages_cached") > 0
    assert ask(cache_salt="another") == (0, text) and ask(cache_salt="another") == (found, text)
    assert httpx.post(f"{server.url}/flush_cache").json()["success"] is True
    assert ask() == (0, text)


def test_200_requests_of_which_a_third_leave(server: Running) -> None:
    """The engine checks its own accounting whenever it falls idle, and would have ended the server if anything did not add up."""

    async def one(client: httpx.AsyncClient, number: int, gate: asyncio.Semaphore) -> None:
        dice = random.Random(number)
        body = {"model": "demo", "prompt": "x = 1\n" * dice.randrange(1, 40), "max_tokens": dice.randrange(1, 40), "stream": True}
        body |= {"temperature": dice.choice([0, 0.7]), "seed": number}
        leaves = number % 3 == 0
        async with gate, client.stream("POST", server.url + "/v1/completions", json=body) as answer:
            assert answer.status_code == 200
            async for _ in answer.aiter_lines():
                if leaves:
                    break

    async def all_of_them() -> None:
        gate = asyncio.Semaphore(24)
        async with httpx.AsyncClient(timeout=120) as client:
            await asyncio.gather(*(one(client, number, gate) for number in range(REQUESTS)))

    asyncio.run(all_of_them())
    deadline = time.monotonic() + 20
    while server.metric("requests_running") + server.metric("kv_pages_used") and time.monotonic() < deadline:
        time.sleep(0.1)
    assert server.metric("requests_running") == server.metric("requests_waiting") == server.metric("kv_pages_used") == 0
    answer = httpx.post(server.url + "/v1/completions", json={"model": "demo", "prompt": "import", "max_tokens": 4}, timeout=30)
    assert answer.status_code == 200
    assert server.peak_bytes() < 1.2 * 2**30


def test_a_flood_is_refused_at_once_and_in_order() -> None:
    """One runs, two wait, and all the others are told to come back."""

    async def flood(url: str) -> list[tuple[httpx.Response, float]]:
        async with httpx.AsyncClient(base_url=url, timeout=180, limits=httpx.Limits(max_connections=None)) as http:

            async def ask() -> tuple[httpx.Response, float]:
                start = time.monotonic()
                asked = {"prompt": "import os", "max_tokens": 200, "ignore_eos": True}
                return await http.post("/v1/completions", json=asked), time.monotonic() - start

            return list(await asyncio.gather(*(ask() for _ in range(24))))

    with running("--max-running-requests", "1", "--max-queued-requests", "2") as small:
        answers = asyncio.run(flood(small.url))
        refused = [(response, seconds) for response, seconds in answers if response.status_code == 429]
        assert sorted(response.status_code for response, _ in answers) == [200] * 3 + [429] * 21
        for response, seconds in refused:
            assert int(response.headers["retry-after"]) >= 1 and response.json()["error"]["code"] == "queue_full"
            assert seconds < min(each for answer, each in answers if answer.status_code == 200)
        assert small.metric('requests_total{outcome="rejected"}') == 21


def test_a_full_disk_under_the_log_harms_nobody() -> None:
    """Every write to standard error fails; both processes write there."""
    with open("/dev/full", "w") as full, running("--log-requests", "--log-interval", "0.1", stderr=full) as server:
        for _ in range(3):
            answer = httpx.post(f"{server.url}/v1/completions", json={"model": "demo", "prompt": "import", "max_tokens": 24})
            assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 24
        assert httpx.post(f"{server.url}/v1/completions", content=b"{").status_code == 400


def test_the_log_of_a_start_is_eight_lines_at_most(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as log, running(stderr=log):
        lines = [line.split(" INFO ")[1] for line in (tmp_path / "log").read_text().splitlines()]
    assert len(lines) <= 7, "one more is on standard output"
    for start in ("mtpserve ", "device: cpu, ", "KV cache: ", "drafter: ", "mtp self-test: ", "tool calls: "):
        assert sum(line.startswith(start) for line in lines) == 1, start
