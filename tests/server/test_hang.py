"""An engine that lives and gets on with nothing is noticed, says where it is, and is ended."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import AbstractContextManager
from pathlib import Path

import httpx
import pytest

from mtpserve.core.heartbeat import PULSE
from mtpserve.core.sampling import SamplingParams
from mtpserve.engine.process.hang import children, is_traced, silence, status
from mtpserve.llm import LLM
from tests.server.conftest import events
from tests.server.metric_text import without_model
from tests.server.test_launch import LONG, ROOT, launched, opened
from tests.server.test_replicas import SPOKEN, engines, health, run, text
from tests.server.test_tensor_parallel import running

linux = pytest.mark.skipif(sys.platform != "linux", reason="what other processes do is read in /proc")
REASON = "the engine process gave no sign of life for 1 s (--engine-timeout)"


@pytest.mark.parametrize("busy", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_a_stopped_engine_is_503_and_its_stacks_are_logged(checkpoint: Path, busy: bool) -> None:
    async def work(http: httpx.AsyncClient) -> None:
        streams = await opened(http) if busy else []
        whole = [asyncio.create_task(http.post("/v1/completions", json=LONG))] if busy else []
        os.kill(server.engine(), signal.SIGSTOP)
        async with asyncio.timeout(60):
            while (answer := await http.get("/health")).status_code == 200:
                await asyncio.sleep(0.02)
        assert REASON in answer.json()["error"]["message"] and int(answer.headers["retry-after"]) >= 1
        assert (await http.get("/ready")).status_code == 503
        for task in whole:
            refused = await task
            assert refused.status_code == 503 and REASON in refused.json()["error"]["message"] and "retry-after" in refused.headers
        for task in streams:
            assert REASON in events(await task)[-1]["error"]["message"]
        assert 'mtpserve_replica_hangs_total{engine="0"} 1.0' in without_model((await http.get("/metrics")).text)

    with launched(checkpoint, "--engine-timeout", "1") as server:
        run(server, work)
        code, log = server.end(30)
    assert code == 1 and f"{REASON}: the process is killed" in log and "most recent call first" in log and "process.py" in log
    assert sys.platform != "linux" or "(state: T (stopped)):" in log


def test_a_hung_engine_is_started_again_and_its_requests_go_on(checkpoint: Path) -> None:
    async def work(http: httpx.AsyncClient) -> None:
        expected = text(await http.post("/v1/completions", json=SPOKEN))
        running = asyncio.create_task(http.post("/v1/completions", json=SPOKEN | {"max_tokens": 800}))
        await asyncio.sleep(0.2)
        os.kill(engines(server)[0], signal.SIGSTOP)
        assert text(await running).startswith(expected)
        await health(http, "ok")
        (told,) = (await http.get("/health?verbose=true")).json()["engines"]
        assert told["restarts"] == 1 and told["reason"] == REASON

    with launched(checkpoint, "--engine-timeout", "1", "--engine-restarts", "2") as server:
        run(server, work)


def test_neither_slow_steps_nor_a_sleep_of_all_processes_are_a_hang(checkpoint: Path) -> None:
    """A step of a second, and a server that is stopped as a whole for longer than the limit."""

    async def work(http: httpx.AsyncClient) -> None:
        running = asyncio.create_task(http.post("/v1/completions", json=SPOKEN | {"max_tokens": 4}))
        await asyncio.sleep(0.3)
        family = [server.process.pid, *engines(server)]
        for pid in family:
            os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(3)
        for pid in family:
            os.kill(pid, signal.SIGCONT)
        text(await running)
        assert 'mtpserve_replica_hangs_total{engine="0"} 0.0' in without_model((await http.get("/metrics")).text)

    with launched(checkpoint, "--engine-timeout", "2.5", FAKE_PAUSE="1") as server:
        run(server, work)


def test_silence_is_counted_while_the_watcher_gets_on_and_ends_with_any_beat() -> None:
    async def main() -> None:
        beats = iter([*range(8), *[8] * 1000])
        loop = asyncio.get_running_loop()
        at = loop.time()
        await silence(lambda: next(beats), os.getpid(), 0.4)
        assert loop.time() - at > (8 + 8) * 0.05 * 0.9

    asyncio.run(main())


@linux
def test_a_process_under_a_debugger_does_not_count() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", "import ctypes, signal; ctypes.CDLL(None).ptrace(0, 0, 0, 0); signal.raise_signal(19)"]
    ) as traced:
        until = time.monotonic() + 60
        try:
            while not is_traced(traced.pid):
                assert time.monotonic() < until
            assert status(traced.pid, "State").startswith("t")
            assert traced.pid in children(os.getpid())
        finally:
            os.kill(traced.pid, signal.SIGKILL)  # not by Popen, to whom a tracing stop looks like an end
    assert not is_traced(os.getpid()) and children(traced.pid) == []


def real(*options: str) -> AbstractContextManager[tuple[subprocess.Popen[str], str]]:
    return running("launch", "--model", "demo", "--port", "0", "--max-total-tokens", "2048", *options)


@linux
@pytest.mark.thorough  # an engine that hangs is below, a rank that dies in tests/engine/test_ranks.py
def test_a_hung_rank_is_noticed_as_the_engine_is() -> None:
    """Rank 0 waits for it in the middle of a layer, and would for ten minutes."""

    async def work(url: str, pid: int) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=120) as http:
            (engine,) = children(pid)
            (rank,) = children(engine)
            os.kill(rank, signal.SIGSTOP)
            answer = await http.post("/v1/completions", json={"prompt": "import os\n", "max_tokens": 40, "temperature": 0})
            assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 40
            async with asyncio.timeout(60):  # the rank has gone on, so that it could write its stacks
                while 'mtpserve_replica_hangs_total{engine="0"} 1.0' not in without_model((await http.get("/metrics")).text):
                    await asyncio.sleep(0.05)
            answer = await http.post("/v1/completions", json={"prompt": "import os\n", "max_tokens": 4, "temperature": 0})
            assert answer.status_code == 200

    with real("--tp", "2", "--engine-timeout", "2", "--engine-restarts", "1") as (process, url):
        asyncio.run(work(url, process.pid))
        process.send_signal(signal.SIGTERM)
        log = process.communicate(timeout=60)[1]
    assert "gave no sign of life for 2 s (--engine-timeout): the process is killed" in log
    assert "(state: T (stopped)):" in log and "engine/startup/rank.py" in log and "engine/process/process.py" in log


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_a_long_step_gives_a_sign_of_life_at_each_layer(backend: str) -> None:
    with LLM("demo", max_total_tokens=1024, attention_backend=backend) as llm:
        before = PULSE.count
        llm.generate([list(range(10, 210))], SamplingParams(max_tokens=1))
        layers = json.loads((ROOT / "mtpserve/demo/config.json").read_text())["num_hidden_layers"]
        assert layers > 1 and PULSE.count - before >= layers
