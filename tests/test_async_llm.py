"""`AsyncLLM`: requests of one event loop in engines of their own, over a fake engine and a real one."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from mtpserve import LLM, AsyncLLM
from mtpserve.core.errors import ConfigError, EngineDead, InvalidRequest, LoadError, RequestFailed, ShuttingDown
from mtpserve.core.protocols.control import PauseMode
from mtpserve.core.sampling import SamplingParams
from mtpserve.text.outputs import Completion
from tests.server.fake_engine import FACTORY, FIRST_TOKEN
from tests.text import tiny

ROOT = Path(__file__).resolve().parents[1]
PATIENCE = 60.0
SHORT, LONG = SamplingParams(max_tokens=5), SamplingParams(max_tokens=4000)
Scenario = Callable[[AsyncLLM], Awaitable[None]]


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'kernels'}")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("model")
    return str(tiny.write(directory, "{% for m in messages %}{{ m.content }}{% endfor %}", temperature=0.6))


@pytest.fixture
def run(directory: str) -> Callable[..., None]:
    """Runs a scenario in an AsyncLLM over fake engines."""

    def run(scenario: Scenario, **options: Any) -> None:
        async def main() -> None:
            async with asyncio.timeout(PATIENCE), AsyncLLM(directory, factory=FACTORY, **options) as llm:
                await scenario(llm)

        asyncio.run(main())

    return run


async def collect(llm: AsyncLLM, prompt: Any = "a", sampling: SamplingParams | None = SHORT, **options: Any) -> list[Completion]:
    return [output async for output in llm.generate(prompt, sampling, **options)]


def text(llm: AsyncLLM, count: int) -> str:
    return llm.tokenizer.decode(list(range(FIRST_TOKEN, FIRST_TOKEN + count)))


def test_outputs_grow_until_they_have_a_reason(run: Callable[..., None]) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        outputs = await collect(llm, [5, 6])
        assert [output.finish_reason for output in outputs] == [None] * (len(outputs) - 1) + ["length"]
        assert all(after.text.startswith(before.text) for before, after in itertools.pairwise(outputs))
        last = outputs[-1]
        assert (last.text, last.tokens, last.prompt_tokens) == (text(llm, 5), list(range(FIRST_TOKEN, FIRST_TOKEN + 5)), 2)
        assert (last.drafted, last.accepted) == (6, 2)
        assert last.outputs[0].text == last.text, "as programs for vLLM read it"

    run(scenario)


def test_requests_run_together_in_several_engines(run: Callable[..., None]) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        assert llm.config.parallel.data_parallel_size == 2
        outputs = await asyncio.gather(*(collect(llm, [5, i], SamplingParams(max_tokens=i)) for i in range(1, 9)))
        assert [output[-1].text for output in outputs] == [text(llm, i) for i in range(1, 9)]

    run(scenario, data_parallel_size=2)


def test_a_stop_string_and_a_chat(run: Callable[..., None]) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        whole = text(llm, 40)
        (*_, last) = await collect(llm, sampling=SamplingParams(stop=(whole[4:7],)))
        assert (last.text, last.finish_reason) == (whole[:4], "stop")
        outputs = [output async for output in llm.chat([{"role": "user", "content": "ab"}], sampling_params=SHORT)]
        assert (outputs[-1].text, outputs[-1].prompt_tokens) == (text(llm, 5), len(llm.tokenizer.encode("ab", special=False)))
        with pytest.raises(InvalidRequest, match=r"messages\[0\]\.role"):
            _ = [output async for output in llm.chat([{"role": "nobody", "content": "ab"}])]

    run(scenario)


def test_an_abort_answers_with_what_there_is(run: Callable[..., None]) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        outputs = []
        async for output in llm.generate("a", LONG, request_id="mine"):
            outputs.append(output)
            if len(outputs) == 3:
                with pytest.raises(InvalidRequest, match=r"^request_id 'mine' is that of a request that still runs$"):
                    await collect(llm, request_id="mine")
                await llm.abort("mine")
        assert outputs[-1].finish_reason == "abort"
        assert outputs[-1].text == text(llm, len(outputs[-1].tokens))
        await llm.abort("mine")
        await llm.abort("nobody")
        assert (await collect(llm, request_id="mine"))[-1].finish_reason == "length", "the id is free again"

    run(scenario)


def test_an_abort_before_the_first_token(run: Callable[..., None]) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        running = asyncio.create_task(collect(llm, sampling=LONG, request_id="early"))
        await asyncio.sleep(0)
        await llm.abort("early")
        (output,) = await running
        assert (output.finish_reason, output.tokens) == ("abort", [])

    run(scenario)


def test_a_stream_that_is_closed_ends_its_request(run: Callable[..., None]) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        async with aclosing(llm.generate("a", LONG)) as stream:
            async for _ in stream:
                break
        client = await llm._engines()
        while client.stats().running:  # statistics have no event
            await asyncio.sleep(0.01)

    run(scenario)


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_a_pause(run: Callable[..., None], mode: PauseMode) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        first = asyncio.create_task(collect(llm, sampling=SamplingParams(max_tokens=200)))
        while not (await llm._engines()).stats().running:
            await asyncio.sleep(0.01)
        await llm.pause_generation(mode)
        assert await llm.is_paused()
        later = asyncio.create_task(collect(llm))
        await asyncio.wait([first, later], timeout=0.2)
        assert (first.done(), later.done()) == (mode == "abort", False)
        await llm.resume_generation()
        assert not await llm.is_paused()
        assert (await first)[-1].finish_reason == ("abort" if mode == "abort" else "length")
        assert (await later)[-1].text == text(llm, 5)

    run(scenario)


def test_what_is_refused(run: Callable[..., None]) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        assert llm.sampling(max_tokens=3) == SamplingParams(max_tokens=3, temperature=0.6)
        with pytest.raises(InvalidRequest, match="sampling or sampling_params"):
            await collect(llm, sampling_params=SHORT)
        with pytest.raises(InvalidRequest, match="seed 400"):
            await collect(llm, sampling=SamplingParams(seed=400))
        with pytest.raises(RequestFailed, match="finite"):
            await collect(llm, sampling=SamplingParams(seed=500))
        with pytest.raises(EngineDead, match="the fake engine broke"):
            await collect(llm, sampling=SamplingParams(seed=666))
        await llm.shutdown()
        await llm.shutdown()
        with pytest.raises(ShuttingDown, match="shutdown was called"):
            await collect(llm)

    run(scenario)


def test_a_start_that_fails_leaves_no_process(directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        llm = AsyncLLM(directory, factory=FACTORY)
        with pytest.raises(LoadError, match="cut off"):
            await collect(llm)
        monkeypatch.delenv("FAKE_ENGINE")
        assert (await collect(llm))[-1].finish_reason == "length", "the next call starts it again"
        await llm.shutdown()

    monkeypatch.setenv("FAKE_ENGINE", "load")
    asyncio.run(main())
    with pytest.raises(ConfigError, match="did you mean page_size"):
        AsyncLLM(directory, page_sise=3)


def test_the_text_is_llms() -> None:
    """Of a real engine, with drafts; that of LLM has none."""
    greedy, prompts = SamplingParams(max_tokens=24, temperature=0), ["import os\n", "class Stack:\n", [5, 6, 7]]
    options: dict[str, Any] = {"dtype": "float32", "max_total_tokens": 1024, "max_running_requests": 2}

    async def main() -> list[Completion]:
        async with AsyncLLM("demo", speculative_algorithm="NEXTN", speculative_adaptive=False, **options) as llm:
            outputs = await asyncio.gather(*(collect(llm, prompt, greedy) for prompt in prompts))
            tokens = [each[-1].tokens for each in outputs]
            for level in (1, 2):
                again = [asyncio.create_task(collect(llm, prompt, greedy)) for prompt in prompts]
                while not (await llm._engines()).stats().running:
                    await asyncio.sleep(0.001)
                await llm.sleep(level, mode="keep")
                assert await llm.is_sleeping()
                await llm.wake_up()
                assert [(await each)[-1].tokens for each in again] == tokens
            await llm.sleep()
            late = asyncio.create_task(collect(llm, prompts[0], greedy))
            await asyncio.sleep(0.1)
            await llm.wake_up()
            assert (await late)[-1].tokens == tokens[0]
            return [each[-1] for each in outputs]

    outputs = asyncio.run(main())
    assert all(output.drafted > 0 for output in outputs)
    with LLM("demo", speculative_algorithm="NONE", **options) as llm:
        assert [each.text for each in llm.generate(prompts, greedy)] == [output.text for output in outputs]
