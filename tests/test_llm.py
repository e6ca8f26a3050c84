"""The offline entry over a fake engine: options, batches, stop strings, streams."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from mtpserve.config import EngineConfig
from mtpserve.core.errors import ConfigError, EngineBusy, InvalidRequest, RequestFailed
from mtpserve.core.request import Finish, Request
from mtpserve.core.sampling import SamplingParams
from mtpserve.engine.startup.drafter import as_chosen
from mtpserve.llm import LLM, engine_config
from mtpserve.text.requests import Prompt
from tests.server.fake_engine import FIRST_TOKEN, FakeEngine
from tests.text import tiny


class Narrow(FakeEngine):
    """Takes two requests at a time."""

    def add(self, request: Request) -> None:
        if len(self.live) == 2:
            raise EngineBusy("full")
        super().add(request)


@pytest.fixture
def llm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    module = ModuleType("mtpserve.engine.startup.build")

    def build_engine(config: EngineConfig, *, progress: bool) -> FakeEngine:
        return Narrow(config.model.model, 0.0)

    module.build_engine, module.as_chosen = build_engine, as_chosen  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mtpserve.engine.startup.build", module)
    with LLM(str(tiny.write(tmp_path, temperature=0.6)), speculative_algorithm="MTP", page_size=32) as made:
        yield made


def text(llm: LLM, count: int) -> str:
    return llm.tokenizer.decode(list(range(FIRST_TOKEN, FIRST_TOKEN + count)))


def test_options_find_their_section(llm: LLM) -> None:
    assert llm.config.cache.page_size == 32
    assert llm.config.spec.steps == llm.engine.card.speculative_steps == 2, "the engine's own"
    assert llm.sampling(max_tokens=3) == SamplingParams(max_tokens=3, temperature=0.6)


def test_vllms_names_of_options_are_taken() -> None:
    config = engine_config({"model": "demo", "max_model_len": 64, "gpu_memory_utilization": 0.2, "max_num_seqs": 2, "enforce_eager": True})
    assert (config.model.context_length, config.cache.mem_fraction_static) == (64, 0.2)
    assert (config.scheduler.max_running_requests, config.scheduler.disable_cuda_graph) == (2, True)
    with pytest.raises(ConfigError, match=r"^context_length is given twice, also as 'max_model_len'$"):
        engine_config({"context_length": 64, "max_model_len": 64})


@pytest.mark.parametrize(("name", "text"), [("page_sise", "unknown option 'page_sise'; did you mean page_size?"), ("port", "'port'")])
def test_an_unknown_option_is_named(name: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        engine_config({"model": "demo", name: 1})
    assert text in str(caught.value)


def test_completions_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    """More prompts than the engine takes at once."""
    sampling = [SamplingParams(max_tokens=n) for n in (9, 3, 1, 6)]
    prompts: list[Prompt] = ["a", "bb", [5, 6], "c"]
    completions = llm.generate(prompts, sampling)
    assert [completion.text for completion in completions] == [text(llm, n) for n in (9, 3, 1, 6)]
    assert [len(completion.tokens) for completion in completions] == [9, 3, 1, 6]
    assert {completion.finish_reason for completion in completions} == {"length"}
    assert completions[2].prompt_tokens == 2
    assert (completions[0].drafted, completions[0].accepted) == (10, 4)
    assert not llm.engine.has_work


def test_what_was_cached_is_counted(llm: LLM) -> None:
    prompt = [5 + i for i in range(40)]
    sampling = SamplingParams(max_tokens=5)
    assert [each.cached_tokens for each in llm.generate([prompt, prompt, [5]], sampling)] == [0, 32, 0]
    assert [step.cached_tokens for step in llm.stream(prompt, sampling)] == [32, 0, 0]
    llm.reset_prefix_cache()
    assert [each.cached_tokens for each in llm.generate(prompt, sampling)] == [0]


def test_one_prompt_may_stand_alone(llm: LLM) -> None:
    sampling = SamplingParams(max_tokens=2)
    assert len(llm.generate("abc", sampling)) == len(llm.generate([5, 6, 7], sampling)) == 1
    assert llm.generate([], sampling) == []
    with pytest.raises(InvalidRequest, match="2 prompts and 1"):
        llm.generate(["a", "b"], [sampling])


def test_a_stop_string_ends_inside_a_run(llm: LLM) -> None:
    whole = text(llm, 40)
    (completion,) = llm.generate("a", SamplingParams(stop=(whole[4:7],)))
    assert completion.text == whole[:4]
    assert (completion.finish_reason, len(completion.tokens)) == ("stop", 7)
    assert not llm.engine.has_work


def test_a_stream_shows_where_tokens_came_from(llm: LLM) -> None:
    steps = list(llm.stream("a", SamplingParams(max_tokens=5)))
    assert "".join(step.text for step in steps) == text(llm, 5)
    assert [step.finish for step in steps] == [None, None, Finish.LENGTH]
    first = steps[0]
    assert first.accepted_pieces == [text(llm, 1)]
    assert first.own_piece == text(llm, 2)[1:]
    assert first.rejected_pieces == [llm.tokenizer.decode([5])]


def test_a_stream_that_is_closed_ends_its_request(llm: LLM) -> None:
    steps = llm.stream("a")
    next(steps)
    steps.close()  # type: ignore[attr-defined]
    assert not llm.engine.has_work


def test_a_request_that_fails(llm: LLM) -> None:
    sampling = SamplingParams(max_tokens=9, seed=500)
    good, failed = llm.generate(["a", "b"], [SamplingParams(max_tokens=9), sampling])
    assert good.finish_reason == "length"
    assert (failed.finish_reason, failed.error, failed.text) == ("error", "not a finite number", text(llm, 4))
    with pytest.raises(RequestFailed, match="finite"):
        list(llm.stream("a", sampling))


def test_it_needs_no_web_framework() -> None:
    code = """
import sys
for name in ("fastapi", "starlette", "uvicorn", "pydantic", "zmq", "prometheus_client", "torch"):
    sys.modules[name] = None
import mtpserve.llm
"""
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
