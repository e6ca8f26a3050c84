"""Several processes that compute one model: they say what one process says, and end together."""

from __future__ import annotations

import os
import queue
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mtpserve.config import (
    CacheConfig,
    DisaggregationConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    SamplingConfig,
    SchedulerConfig,
    SpecConfig,
)
from mtpserve.core.errors import ConfigError, EngineDead
from mtpserve.core.kv_transfer import PageOffer, PageSource
from mtpserve.core.plan import SpanResult, StepPlan, StepResult, Transfer, Transferred
from mtpserve.core.request import Request
from mtpserve.core.sampling import GrammarSpec, SamplingParams
from mtpserve.core.spec_sizes import SpecShape
from mtpserve.engine.engine import Engine
from mtpserve.engine.parallel import ranks as ranks_module
from mtpserve.engine.parallel.ranks import EveryRank, TransfersOfEach, plan_of_each
from mtpserve.engine.startup.build import build_engine
from tests import selection
from tests.engine.bad_ranks import NAME
from tests.spec.test_moved import hear

ROOT = Path(__file__).parents[2]
CHAIN = SpecConfig(speculative_algorithm="NEXTN", speculative_num_steps=3, speculative_adaptive=False)
TREE = SpecConfig(speculative_algorithm="NEXTN", speculative_num_steps=3, speculative_eagle_topk=2, speculative_num_draft_tokens=6)
GREEDY, SAMPLED = SamplingParams(max_tokens=24, temperature=0), SamplingParams(max_tokens=24, temperature=0.9, seed=3)
ASKED = {
    "greedy": GREEDY,
    "sampled": SAMPLED,
    "penalties": replace(SAMPLED, presence_penalty=1.5, frequency_penalty=0.7, repetition_penalty=1.4),
    "bias": replace(SAMPLED, logit_bias={40: 3.0, 50: -100.0}),
    "grammar": replace(SAMPLED, max_tokens=40, grammar=GrammarSpec("regex", r"def [a-z]{5,9}\([a-z]+\): return [0-9]{6,12}")),
    "log-probabilities": replace(SAMPLED, logprobs=2),
    "custom": replace(SAMPLED, custom_params={"bad": "no"}),
}


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Rank 0, which is this process, is bound to a part of the cores."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'kernels'}")
    cores, threads = os.sched_getaffinity(0), torch.get_num_threads()
    yield
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(threads)


def config_of(ranks: int, spec: SpecConfig = CHAIN, tokens: int = 2048, backend: str = "auto") -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(device="cpu", dtype="float32", attention_backend=backend),
        cache=CacheConfig(max_total_tokens=tokens),
        spec=spec,
        sampling=SamplingConfig(logits_processors=NAME),
        scheduler=SchedulerConfig(max_running_requests=4, random_seed=0),
        parallel=ParallelConfig(tensor_parallel_size=ranks),
    )


@contextmanager
def built(config: EngineConfig) -> Iterator[Engine]:
    engine = build_engine(config, poison=True)
    others = processes(engine)
    try:
        yield engine
    finally:
        engine.close()
    assert not any(alive(pid) for pid in others)


def processes(engine: Engine) -> list[int]:
    runner = engine.runner
    return [other.process.pid for other in runner.others._others] if isinstance(runner, EveryRank) else []


def children() -> list[str]:
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def requests(again: str = "") -> list[Request]:
    prompts = {name: [5 + 7 * i % 60 for i in range(3 + 9 * place)] for place, name in enumerate(ASKED)}
    return [Request(name + again, prompts[name], sampling) for name, sampling in ASKED.items()]


def texts(engine: Engine) -> dict[str, list[int]]:
    """Twice: the second time prompts are found in the cache."""
    first = {name: heard.tokens for name, heard in hear(engine, requests()).items()}
    again = {name.removesuffix(" again"): heard.tokens for name, heard in hear(engine, requests(" again")).items()}
    assert engine.stats.cached_prompt_tokens_total > 0 and first == again
    engine.check_integrity()
    return first


@pytest.mark.parametrize(("spec", "backend"), [(CHAIN, "auto"), (TREE, "reference")], ids=["chain", "tree in plain torch"])
def test_two_say_what_one_says(spec: SpecConfig, backend: str) -> None:
    with built(config_of(1, spec, backend=backend)) as alone:
        expected = texts(alone)
    assert len({tuple(text) for text in expected.values()}) == len(ASKED)
    with built(config_of(2, spec, backend=backend)) as engine:
        assert texts(engine) == expected
        (other,) = processes(engine)
        if len(cores := os.sched_getaffinity(0) | os.sched_getaffinity(other)) > 1:
            assert os.sched_getaffinity(0).isdisjoint(os.sched_getaffinity(other)), cores
        assert "2 ranks by" in engine.card.kernels


def test_without_shared_memory_and_with_few_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """By gloo; requests are preempted; the shape of drafts changes."""
    monkeypatch.setattr(ranks_module, "shares_memory", lambda device: False)
    with built(config_of(1, tokens=160)) as alone, built(config_of(2, tokens=160)) as engine:
        expected = {name: heard.tokens for name, heard in hear(alone, requests()).items()}
        assert {name: heard.tokens for name, heard in hear(engine, requests()).items()} == expected
        assert engine.stats.preemptions_total > 0 and "by gloo" in engine.card.kernels
        for each in (alone, engine):
            each.draft_with(SpecShape(1, 1, 1))
        assert hear(engine, requests("1"))["greedy1"].tokens == expected["greedy"]


def to_the_end(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("killed", "rank 1 of the model was killed by SIGKILL"),
        ("differs", "rank 1 of the model failed: it has chosen other tokens than rank 0"),
    ],
)
def test_a_rank_that_fails_ends_the_engine(what: str, reason: str) -> None:
    with built(config_of(2)) as engine:
        engine.add(Request("a", [7, 8], replace(GREEDY, custom_params={"bad": what})))
        with pytest.raises(EngineDead, match=reason):
            to_the_end(engine)
        with pytest.raises(EngineDead, match=reason):
            engine.check_alive()


def test_rank_0_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where its device waits for a rank that has ended."""
    exits = queue.Queue[int]()
    monkeypatch.setattr(ranks_module, "STUCK_S", 0.05)
    monkeypatch.setattr(os, "_exit", exits.put)
    with built(config_of(2)) as engine:
        runner = engine.runner
        assert isinstance(runner, EveryRank)
        with runner.others.together():
            os.kill(processes(engine)[0], signal.SIGKILL)
            assert exits.get(timeout=60) == 1


@pytest.mark.parametrize(
    ("what", "error", "reason"),
    [
        ("killed", EngineDead, "rank 1 of the model was killed by SIGKILL"),
        ("refuses", ConfigError, f"--logits-processors {NAME}: RuntimeError: not in this rank"),
    ],
)
def test_a_rank_that_cannot_start(what: str, error: type[Exception], reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAD_RANK", what)
    before = children()
    with pytest.raises(error, match=reason):
        build_engine(config_of(2))
    assert children() == before


def below(ranks: int, host: float = 0.02, folder: Path | None = None) -> EngineConfig:
    """A device whose pages do not last for two rounds of the same prompts."""
    cache = CacheConfig(max_total_tokens=112, page_size=8, kv_offload_gib=host, kv_offload_dir=None if folder is None else str(folder))
    return replace(config_of(ranks), cache=cache)


def apart(request: Request) -> Request:
    return replace(request, prompt=[70 + list(ASKED).index(request.id[:-1]), *request.prompt])


def rounds(engine: Engine) -> list[list[int]]:
    """One request after the other, each of them twice. No prompt is the beginning of another one."""
    chosen = [requests(again) if selection.ALL else short(requests(again)[::2]) for again in ("1", "2")]
    texts = [[hear(engine, [apart(request)])[request.id].tokens for request in each] for each in chosen]
    assert texts[0] == texts[1] and engine.stats.cached_prompt_tokens_total > 0
    engine.check_integrity()
    return texts[0]


def short(chosen: list[Request]) -> list[Request]:
    return [replace(request, sampling=replace(request.sampling, max_tokens=8)) for request in chosen]


def test_pages_of_all_ranks_in_host_memory_and_on_disk(tmp_path: Path) -> None:
    with built(config_of(1)) as alone:
        expected = rounds(alone)
    with built(below(2)) as engine:
        assert rounds(engine) == expected
        moved, sizes = engine.stats.transfers_total, engine.stats.transfer_bytes_total
        assert engine.stats.loaded_pages["host"] > 5 and not engine.stats.failed_transfers_total and "spill" not in moved
        each = sizes["load"] / moved["load"]
    with built(below(1)) as engine:
        assert rounds(engine) == expected
        # What is whole in all ranks, like the boundary row, is stored for each of them.
        assert engine.stats.transfer_bytes_total["load"] / engine.stats.transfers_total["load"] < each
    for start in ("first", "second"):
        with built(below(2, folder=tmp_path)) as engine:
            assert rounds(engine) == expected
            to_the_end(engine)
            assert engine.stats.transfers_total["spill"] > 5 or start == "second"
            assert engine.stats.loaded_pages["disk"] > 5 or start == "first"


@pytest.mark.thorough  # damaged files are in tests/spec/test_tiers.py, and what makes a page another one in test_fingerprint.py
def test_pages_on_disk_of_another_number_of_ranks_and_damaged_ones(tmp_path: Path) -> None:
    with built(below(2, folder=tmp_path)) as engine:
        expected = rounds(engine)
        to_the_end(engine)
        assert engine.stats.transfers_total["spill"] > 5
    with built(below(1, folder=tmp_path)) as engine:
        assert rounds(engine) == expected and not engine.stats.loaded_pages["disk"]
    for file in tmp_path.rglob("*.kv"):
        file.write_bytes(file.read_bytes()[:-1] + b"!")
    with built(below(2, folder=tmp_path)) as engine:
        assert rounds(engine) == expected and engine.stats.failed_transfers_total["fetch"] > 0


def test_a_prompt_computed_by_other_ranks() -> None:
    """Its pages come from another node with as many ranks; those of a node with another number are not taken."""

    def of(mode: str, ranks: int) -> EngineConfig:
        nodes = DisaggregationConfig(disaggregation_mode=mode, disaggregation_bootstrap_port=0)
        return replace(below(ranks), disaggregation=nodes)

    with built(config_of(1)) as alone:
        expected = {name: heard.tokens for name, heard in hear(alone, requests()).items()}
    with built(of("prefill", 2)) as prefill, built(of("decode", 2)) as decode, built(of("decode", 1)) as other:
        offers = dict[str, PageOffer]()
        for request in requests():
            prefill.add(replace(request, sampling=replace(request.sampling, max_tokens=1), kv_offer_id=request.id))
            while prefill.has_work:
                for event in prefill.step():
                    if event.offer is not None:
                        offers[event.id] = event.offer
        sources = {name: PageSource(offer.host, offer.port, offer.lease) for name, offer in offers.items()}
        for node, reason in ((decode, None), (other, "differs")):
            heard = hear(node, [replace(request, source=sources[request.id]) for request in requests()])
            assert {name: text.tokens for name, text in heard.items()} == expected
            failed = node.stats.failed_pulls_total
            assert set(failed) == {reason} if reason else node.stats.transfers_total["pull"] > 5 and not failed
        assert prefill.stats.transfers_total["send"] == decode.stats.transfers_total["pull"]


def test_a_transfer_has_ended_when_all_ranks_have_moved_their_parts() -> None:
    save, spill = Transfer(1, "save", 0, 3, 7, b"key"), Transfer(2, "spill", 0, 4, key=b"other")
    spans, ended = [SpanResult([], 0, 0)], TransfersOfEach(2)
    assert ended.merged(StepResult(spans)).transferred == []
    ended.add([Transferred(save, False, 2.0, 100)])
    whole = Transferred(spill, True, 1.0, 300)
    assert ended.merged(StepResult(spans, [whole])).transferred == [whole]
    began = time.monotonic()
    assert ended.merged(StepResult([])).transferred == [] and time.monotonic() - began > 0.005  # it has waited
    assert ended.merged(StepResult([], [Transferred(save, True, 1.0, 100)])).transferred == [Transferred(save, False, 2.0, 200)]
    assert ended.merged(StepResult([])).transferred == []
    plan = StepPlan([], 0, transfers=[save, spill])
    assert plan_of_each(plan).transfers == [save]


def test_what_ranks_cannot_do_is_refused() -> None:
    with pytest.raises(ConfigError, match="--tensor-parallel-size must be in"):
        ParallelConfig(tensor_parallel_size=0)
