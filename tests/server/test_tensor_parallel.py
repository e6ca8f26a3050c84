"""The whole server with two engines of two ranks each, of which one is killed under load."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from mtpserve.core.sampling import SamplingParams
from mtpserve.llm import LLM
from tests.server.test_launch import ROOT, alive

# A source's command, with 2 for 8 and the bundled model in place of its own.
SOURCE = (
    "launch --model-path demo --tp-size 2 --dp 2 --speculative-algorithm NEXTN --speculative-num-steps 3 --speculative-eagle-topk 1 "
    "--speculative-num-draft-tokens 4 --speculative-draft-model-path mtpserve/demo --dtype float32 "
    "--max-total-tokens 4096 --engine-restarts 3 --port 0"
)
PROMPTS = [f"import os\n\n\ndef read_{number}(" for number in range(6)]
ASKED = {"max_tokens": 120, "temperature": 0}


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@contextmanager
def running(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    command = [sys.executable, "-m", "mtpserve", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=ROOT) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"http://\S+", process.stdout.readline())
            assert found, process.communicate(timeout=5)
            yield process, found[0]
        finally:
            process.kill()


@pytest.mark.thorough  # tests/engine/test_ranks.py kills a rank of one engine, test_replicas.py one engine of two
def test_a_rank_is_killed_and_the_text_is_that_of_one_process() -> None:
    with LLM("demo", dtype="float32", max_total_tokens=4096, speculative_algorithm="NEXTN") as llm:
        sampling = SamplingParams(**ASKED)  # type: ignore[arg-type]
        expected = [each.text for each in llm.generate(PROMPTS, sampling)]

    async def work(url: str, ranks: list[int]) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:
            tasks = [asyncio.create_task(http.post("/v1/completions", json=ASKED | {"prompt": prompt})) for prompt in PROMPTS]
            await asyncio.sleep(0.3)
            os.kill(ranks[0], signal.SIGKILL)
            answers = [answer.json() for answer in await asyncio.gather(*tasks)]
            assert [answer["choices"][0]["text"] for answer in answers] == expected
            async with asyncio.timeout(20):  # an engine without work looks now and then
                while (told := (await http.get("/health?verbose=true")).json())["engines"][0]["reason"] is None:
                    await asyncio.sleep(0.02)
            assert told["engines"][0]["reason"] == "rank 1 of the model was killed by SIGKILL"
            assert [each["ranks"] for each in told["engines"]] == [2, 2]
            about = (await http.get("/server_info")).json()
            assert about["internal_states"][0]["avg_spec_accept_length"] > 1.5
            assert (about["tp_size"], about["dp_size"]) == (2, 2) and ", 2 ranks by " in about["kernels"]

    with running(*SOURCE.split()) as (process, url):
        engines = children(process.pid)
        ranks = [rank for engine in engines for rank in children(engine)]
        assert (len(engines), len(ranks)) == (2, 2)
        asyncio.run(work(url, ranks))
        others = [*children(process.pid), *(rank for engine in children(process.pid) for rank in children(engine))]
        process.kill()
        process.wait()
        until = time.monotonic() + 5
        while left := [pid for pid in (*engines, *ranks, *others) if alive(pid)]:
            assert time.monotonic() < until, left
            time.sleep(0.02)
