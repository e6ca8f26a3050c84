"""The engine process and its client, for real, with a fake engine inside: start, stream, abort, and every way to die."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from mtpserve.config import EngineConfig
from mtpserve.core.errors import (
    ConfigError,
    EngineBusy,
    EngineDead,
    InvalidRequest,
    LoadError,
    MTPServeError,
    QueueFull,
    RequestFailed,
    ShuttingDown,
)
from mtpserve.core.request import Finish, Request, TokenEvent
from mtpserve.core.sampling import GrammarSpec, SamplingParams
from mtpserve.core.stats.reports import SpecChange
from mtpserve.engine.process import client as client_module
from mtpserve.engine.process.client import ProcessClient, private_directory
from tests.engine import fifo_engine
from tests.server.fake_engine import CONTEXT, FACTORY, FIRST_TOKEN

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 60.0  # seconds until something is taken for lost, on a busy machine


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@asynccontextmanager
async def started(factory: str = FACTORY) -> AsyncIterator[ProcessClient]:
    client = ProcessClient(EngineConfig(), factory=factory)
    try:
        await asyncio.wait_for(client.start(), PATIENCE)
        yield client
    finally:
        await client.stop()
        assert client._process is not None
        assert client._process.returncode is not None
        assert not Path(client._directory).exists()


def scenario(work: Callable[[ProcessClient], Awaitable[None]], factory: str = FACTORY) -> None:
    async def main() -> None:
        async with started(factory) as client:
            await asyncio.wait_for(work(client), PATIENCE)

    asyncio.run(main())


def request(id: str = "a", max_tokens: int = 9, seed: int | None = None) -> Request:
    return Request(id, [1, 2, 3], SamplingParams(max_tokens=max_tokens, seed=seed))


async def collect(client: ProcessClient, what: Request) -> list[TokenEvent]:
    return [event async for events in client.submit(what) for event in events]


async def until(condition: Callable[[], bool], timeout: float = PATIENCE) -> None:
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, "timed out"
        await asyncio.sleep(0.01)


def alive(pid: int) -> bool:
    """Running, and not a corpse that nobody has collected."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_streams_and_statistics() -> None:
    async def work(client: ProcessClient) -> None:
        assert client.card.name == "fake"
        both = await asyncio.gather(collect(client, request("a")), collect(client, request("b", 4)))
        for events, count in zip(both, (9, 4), strict=True):
            assert [token for event in events for token in event.tokens] == list(range(FIRST_TOKEN, FIRST_TOKEN + count))
            assert [event.finish for event in events] == [None] * (len(events) - 1) + [Finish.LENGTH]
            assert events[0].num_accepted_tokens == 1
            assert events[0].proposal.tokens == [FIRST_TOKEN, 5]
        await until(lambda: client.stats().running == 0)
        assert client.stats().generation_tokens_total == 13
        assert client.dead is None

    scenario(work)


def test_depths_are_told_and_set_in_order() -> None:
    async def work(client: ProcessClient) -> None:
        running = asyncio.create_task(collect(client, request(max_tokens=200)))
        changes = (SpecChange(), SpecChange(num_steps=1), SpecChange(adaptive=False), SpecChange(num_steps=0, reset=True))
        reports = await asyncio.gather(*map(client.set_spec, changes))
        assert [report.state and (report.state.adaptive, report.state.num_steps) for report in reports] == [
            (True, 2), (True, 1), (False, 1), (False, 0),
        ]  # fmt: skip
        assert {report.configured for report in reports} == {2}
        assert len(await running) == 100
        await until(lambda: (state := client.stats().depths) is not None and state.num_steps == 0)
        given_up = asyncio.create_task(client.set_spec(SpecChange(num_steps=2)))
        await asyncio.sleep(0)
        given_up.cancel()
        report = await client.set_spec(SpecChange())
        assert report.state is not None and report.state.num_steps == 2

    scenario(work)


def test_nobody_waits_for_anothers_grammar(tmp_path: Path) -> None:
    os.mkfifo(fifo := tmp_path / "fifo")

    def formed(id: str, text: str) -> Request:
        return Request(id, [1, 2, 3], SamplingParams(max_tokens=4, grammar=GrammarSpec("regex", text)))

    async def work(client: ProcessClient) -> None:
        slow = asyncio.create_task(collect(client, formed("slow", f"wait for {fifo}")))
        given_up = asyncio.create_task(collect(client, formed("given up", "wait 0.1")))
        assert len(await collect(client, request("a", 100))) == 50
        given_up.cancel()
        assert not slow.done()
        await asyncio.to_thread(fifo.write_text, "now")  # opens when the compiler reads
        assert (await slow)[-1].finish is Finish.LENGTH
        with pytest.raises(InvalidRequest, match="it is bad"):
            await collect(client, formed("bad", "bad"))
        many = await asyncio.gather(*(collect(client, formed(f"{i}", "wait 0.02")) for i in range(70)), return_exceptions=True)
        busy = [one for one in many if isinstance(one, EngineBusy)]
        assert len(busy) == 6 and "wait for their grammars" in str(busy[0])
        await until(lambda: client.stats().running == 0)

    scenario(work, fifo_engine.FACTORY)


def test_the_directory_is_private_and_goes_when_both_sides_are_connected() -> None:
    async def main() -> None:
        client = ProcessClient(EngineConfig(), factory=FACTORY)
        assert Path(client._directory).stat().st_mode & 0o777 == 0o700
        await client.start()
        assert not Path(client._directory).exists()
        assert len(await collect(client, request())) == 5
        await client.stop()
        await client.stop()

    asyncio.run(main())


def test_a_place_where_no_directory_can_be_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(MTPServeError, match=r"cannot create a directory .*No such file or directory: '.*nowhere.*set TMPDIR"):
        private_directory()
    long = tmp_path / ("a" * 120)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with pytest.raises(MTPServeError, match="TMPDIR is too long"):
        private_directory()
    assert not list(long.iterdir())


def test_refusals_belong_to_their_request() -> None:
    async def work(client: ProcessClient) -> None:
        with pytest.raises(InvalidRequest, match="seed 400") as caught:
            await collect(client, request(seed=400))
        assert caught.value.param == "seed"
        with pytest.raises(EngineBusy, match="queue is full"):
            await collect(client, request(seed=429))
        failed = await collect(client, request(seed=500))
        assert (failed[-1].finish, failed[-1].error) == (Finish.ERROR, "not a finite number")
        assert len(await collect(client, request())) == 5

    scenario(work)


def test_a_full_queue_refuses_without_the_engine() -> None:
    """A step may take long, and who is one too many is told meanwhile. Here the engine's process stands still."""

    async def work(client: ProcessClient) -> None:
        assert client._process is not None
        client.card = replace(client.card, capacity=2)
        os.kill(client._process.pid, signal.SIGSTOP)
        tasks = [asyncio.create_task(collect(client, request(id, CONTEXT - 3))) for id in "ab"]
        await asyncio.sleep(0)
        with pytest.raises(QueueFull, match="2 requests running or waiting"):
            await collect(client, request("c"))
        os.kill(client._process.pid, signal.SIGCONT)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert len(await collect(client, request("d", 2))) == 1

    scenario(work)


@pytest.mark.parametrize("how", ["close", "abort", "cancel"])
def test_ending_a_stream_early_frees_the_engine(how: str) -> None:
    async def work(client: ProcessClient) -> None:
        stream = client.submit(request(max_tokens=CONTEXT - 3))
        await anext(stream)
        if how == "close":
            await stream.aclose()
        elif how == "abort":
            client.abort("a")
            client.abort("a")
            client.abort("unknown")
            with pytest.raises(RequestFailed, match="aborted"):
                await anext(stream)
        else:
            task = asyncio.create_task(collect(client, request("b", CONTEXT - 3)))
            await until(lambda: client.stats().running == 2)
            task.cancel()
            await stream.aclose()
        await until(lambda: client.stats().running == 0)
        assert client.stats().generation_tokens_total < 200

    scenario(work)


def test_a_reader_that_does_not_read_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "MAX_UNREAD", 8)

    async def work(client: ProcessClient) -> None:
        stream = client.submit(request(max_tokens=CONTEXT - 3))
        await anext(stream)
        await until(lambda: client.stats().running == 0)
        with pytest.raises(RequestFailed, match="does not read"):
            await anext(stream)
        assert len(await collect(client, request("b", 4))) == 2

    scenario(work)


def test_killed() -> None:
    async def work(client: ProcessClient) -> None:
        streams = [asyncio.create_task(collect(client, request(id, CONTEXT - 3))) for id in "ab"]
        await until(lambda: client.stats().running == 2)
        assert client._process is not None
        os.kill(client._process.pid, signal.SIGKILL)
        asked = asyncio.create_task(client.set_spec(SpecChange()))
        for stream in streams:
            with pytest.raises(EngineDead, match="SIGKILL"):
                await stream
        with pytest.raises(EngineDead, match="SIGKILL"):
            await asked
        assert client.dead is not None
        with pytest.raises(EngineDead):
            await client.set_spec(SpecChange())
        assert await client.wait_dead() == client.dead
        with pytest.raises(EngineDead):
            await collect(client, request())

    scenario(work)


def test_an_exception_in_a_step_ends_everything_with_its_line() -> None:
    async def work(client: ProcessClient) -> None:
        other = asyncio.create_task(collect(client, request("b", CONTEXT - 3)))
        with pytest.raises(EngineDead, match="RuntimeError: the fake engine broke"):
            await collect(client, request(seed=666))
        with pytest.raises(EngineDead, match="broke"):
            await other

    scenario(work)


@pytest.mark.parametrize(
    ("fault", "error", "text"),
    [
        ("config", ConfigError, "--fake must not be given"),
        ("load", LoadError, "model.safetensors: tensor 'x' is cut off"),
        ("bug", EngineDead, "the engine failed: RuntimeError: unexpected"),
    ],
)
def test_what_goes_wrong_at_the_start_is_one_line(monkeypatch: pytest.MonkeyPatch, fault: str, error: type[Exception], text: str) -> None:
    monkeypatch.setenv("FAKE_ENGINE", fault)

    async def main() -> None:
        async with started():
            raise AssertionError("it started")

    with pytest.raises(error) as caught:
        asyncio.run(main())
    assert str(caught.value) == text


def test_a_process_that_cannot_even_start() -> None:
    async def main() -> None:
        async with started("tests.server.nowhere:build"):
            raise AssertionError("it started")

    with pytest.raises(EngineDead, match="nowhere"):
        asyncio.run(main())


def test_stopping_while_it_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_ENGINE", "slow")

    async def main() -> None:
        client = ProcessClient(EngineConfig(), factory=FACTORY)
        starting = asyncio.create_task(client.start())
        await asyncio.sleep(0.3)
        await client.stop(grace=0.1)
        with pytest.raises(ShuttingDown, match="shutting down"):
            await starting
        assert client._process is not None
        assert client._process.returncode is not None

    asyncio.run(main())


def test_signals_to_the_process_do_nothing() -> None:
    async def work(client: ProcessClient) -> None:
        assert client._process is not None
        os.kill(client._process.pid, signal.SIGINT)
        os.kill(client._process.pid, signal.SIGTERM)
        assert len(await collect(client, request())) == 5

    scenario(work)


def test_idle_costs_nothing() -> None:
    async def work(client: ProcessClient) -> None:
        await collect(client, request())
        assert client._process is not None
        stat = Path(f"/proc/{client._process.pid}/stat")

        def ticks() -> int:
            return sum(map(int, stat.read_text().rsplit(")", 1)[1].split()[11:13]))

        await asyncio.sleep(0.1)
        before = ticks()
        await asyncio.sleep(0.3)
        assert ticks() - before <= 2  # of 30

    scenario(work)


@pytest.mark.parametrize("fault", ["", "slow"])
def test_the_process_dies_with_its_parent(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    monkeypatch.setenv("FAKE_ENGINE", fault)
    code = f"""
import asyncio
import os
from mtpserve.config import EngineConfig
from mtpserve.engine.process.client import ProcessClient

async def main():
    client = ProcessClient(EngineConfig(), factory={FACTORY!r})
    starting = asyncio.create_task(client.start())
    while os.path.exists(client._directory):
        await asyncio.sleep(0.01)
    if not {fault!r}:
        await starting
    print(client._process.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert alive(child)
        parent.kill()
    end = time.monotonic() + PATIENCE
    while alive(child):
        assert time.monotonic() < end, "the engine outlived its parent"
        time.sleep(0.02)


def test_torchs_caches_are_bounded_before_it_is_imported() -> None:
    """Without the bound a load that varies makes the process grow by hundreds of megabytes."""
    told = "import os; from mtpserve.engine.process.process import begin; begin(); print(os.environ['ONEDNN_PRIMITIVE_CACHE_CAPACITY'])"
    plain = {name: value for name, value in os.environ.items() if not name.endswith("CACHE_CAPACITY")}
    assert subprocess.run([sys.executable, "-c", told], env=plain, capture_output=True, text=True, check=True).stdout == "48\n"
