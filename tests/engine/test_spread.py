"""Engine processes that share a model's experts: their texts are one engine's, none of them holds more than its part, and they die and
start together."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
import torch

from mtpserve.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig, SchedulerConfig, SpecConfig
from mtpserve.core.errors import ConfigError
from mtpserve.core.request import Request
from mtpserve.core.sampling import SamplingParams
from mtpserve.engine.parallel.rank_messages import FinishTick
from mtpserve.engine.parallel.ranks import RankProcesses
from mtpserve.engine.parallel.spread import ticks_of
from mtpserve.engine.process.client import ProcessClient
from mtpserve.engine.process.replicas import Replicas
from mtpserve.engine.startup.build import build_engine
from mtpserve.engine.startup.planning import describe, load_model, plan
from mtpserve.engine.startup.storage import Storage
from mtpserve.layers.decoder import DecoderModel
from mtpserve.layers.kernels import KERNELS
from mtpserve.runtime.parallel.peers import TorchPeers
from mtpserve.runtime.parallel.rounds import Rounds
from tests import selection
from tests.models.checkpoints import DEEPSEEK, deepseek, glm4_moe, llama

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 300  # seconds, on a busy machine
EVEN = {"num_attention_heads": 4, "num_key_value_heads": 4, "moe_intermediate_size": 24}  # what ranks can divide
TREE = SpecConfig(speculative_algorithm="MTP", speculative_num_steps=3, speculative_eagle_topk=2, speculative_num_draft_tokens=6)
CHAIN = SpecConfig(speculative_algorithm="MTP", speculative_num_steps=2)


def config_of(directory: Path, spec: SpecConfig, **parallel: Any) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(model=str(directory), dtype="float32", device="cpu"),
        cache=CacheConfig(max_total_tokens=512, page_size=4),
        scheduler=SchedulerConfig(max_running_requests=8, chunked_prefill_size=16),
        spec=replace(spec, speculative_draft_model_quantization="none", speculative_adaptive=False),
        parallel=ParallelConfig(**parallel),
    )


def asked(count: int, tokens: int = 20) -> list[Request]:
    """With two beginnings, of which each is in one engine's prefix cache; every second one is sampled."""
    made = []
    for number in range(count):
        sampling = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=float(number % 2), seed=number)
        made.append(Request(str(number), [*[2 + number % 2] * 9, *range(3, 5 + number % 5)], sampling))
    return made


def alone(config: EngineConfig, requests: list[Request]) -> list[list[int]]:
    """The texts of one engine in this process."""
    engine, texts = build_engine(replace(config, parallel=ParallelConfig())), dict[str, list[int]]()
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for event in engine.step():
            assert event.error is None, event.error
            texts.setdefault(event.id, []).extend(event.tokens)
    return [texts[request.id] for request in requests]


def test_all_ranks_of_an_engine_finish_its_tick_together() -> None:
    calls = list[object]()

    class Ranks:
        size = 2

        @contextmanager
        def together(self) -> Iterator[None]:
            calls.append("begin")
            yield
            calls.append("end")

        def tell(self, order: object) -> None:
            calls.append(order)

    spread = SimpleNamespace(finish=lambda: calls.append("finish"))
    ticks = ticks_of(cast(Rounds, spread), cast(TorchPeers, None), cast(RankProcesses, Ranks()))
    ticks.finish()
    assert calls == ["begin", FinishTick(), "finish", "end"]


def serve(config: EngineConfig, folder: Path, work: Callable[[Replicas, list[ProcessClient]], Awaitable[None]]) -> None:
    """As server/launch does it."""
    made: list[ProcessClient] = []

    def make(number: int, restarts: int) -> ProcessClient:
        made.append(ProcessClient(replace(config, replica=number, meeting=str(folder / f"meeting {restarts}")), log_level="warning"))
        return made[-1]

    async def main() -> None:
        count = config.parallel.data_parallel_size
        replicas = Replicas(make, count, restarts=config.parallel.restarts, seed=1, together=config.parallel.spreads)
        try:
            await asyncio.wait_for(replicas.start(), PATIENCE)
            await asyncio.wait_for(work(replicas, made), PATIENCE)
        finally:
            await replicas.stop()

    asyncio.run(main())


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'kernels'}")


async def text(replicas: Replicas, request: Request) -> list[int]:
    return [token async for events in replicas.submit(request) for event in events for token in event.tokens]


def test_two_engines_are_one_and_outlive_the_death_of_either(tmp_path: Path) -> None:
    deepseek(tmp_path / "model")
    config = config_of(tmp_path / "model", CHAIN, data_parallel_size=2, enable_expert_parallel=True, engine_restarts=2)
    requests = asked(40 if selection.ALL else 16)
    expected = alone(config, requests)

    async def work(replicas: Replicas, made: list[ProcessClient]) -> None:
        # One of them has nothing to do.
        assert await text(replicas, requests[0]) == expected[0]
        tasks = [asyncio.create_task(text(replicas, request)) for request in requests[1:]]
        while not any(task.done() for task in tasks):
            await asyncio.sleep(0.01)
        process = made[1]._process
        assert process is not None
        os.kill(process.pid, signal.SIGKILL)
        assert await asyncio.gather(*tasks) == expected[1:]
        assert len(made) == 4 and [each.restarts_total for each in replicas.engines] == [1, 1]
        used = [each.stats for each in replicas.engines]
        assert all(stats.generation_tokens_total > 0 for stats in used) and sum(stats.cached_prompt_tokens_total for stats in used) > 0
        assert sum(stats.draft_tokens_total for stats in used) > 0

    serve(config, tmp_path, work)


@pytest.mark.thorough  # that a rank's death is its engine's is seen in test_ranks.py, and what an engine's death is to the others above
def test_engines_of_several_ranks_outlive_the_death_of_one(tmp_path: Path) -> None:
    deepseek(tmp_path / "model", **EVEN)
    parallel = {"data_parallel_size": 2, "tensor_parallel_size": 2, "enable_expert_parallel": True, "engine_restarts": 1}
    config = config_of(tmp_path / "model", CHAIN, **parallel)
    requests = asked(20)
    expected = alone(config, requests)

    async def work(replicas: Replicas, made: list[ProcessClient]) -> None:
        tasks = [asyncio.create_task(text(replicas, request)) for request in requests]
        while not any(task.done() for task in tasks):
            await asyncio.sleep(0.01)
        process = made[0]._process
        assert process is not None
        (rank,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(rank), signal.SIGKILL)
        assert await asyncio.gather(*tasks) == expected
        assert [each.restarts_total for each in replicas.engines] == [1, 1]

    serve(config, tmp_path, work)


@pytest.mark.thorough  # two engines that share experts are above, ranks in test_ranks.py
@pytest.mark.parametrize("devices", ["--tp-size 4 --dp 4 --ep 4", "--tp-size 4 --dp-size 2"])
def test_the_sources_commands(tmp_path: Path, devices: str) -> None:
    """SGLang's for eight GPUs, of which each, or four, are an engine; with half as many, and a small model of random weights, which are the
    same in parts as in one engine."""
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK | EVEN))
    owners, load = {"1": [0, 1, 2, 3, 3, 2, 1, 0], "3": [3, 0, 0, 1, 2, 0, 0, 0]}, tmp_path / "load"
    (tmp_path / "map.json").write_text(json.dumps(owners))
    options = f"{devices} --enable-dp-attention --speculative-algorithm NEXTN --speculative-num-steps 3 --speculative-eagle-topk 2"
    command = [sys.executable, "-m", "mtpserve", "launch", "--model-path", str(tmp_path), "--load-format", "dummy", *options.split()]
    command += ["--speculative-num-draft-tokens", "6", "--expert-map", str(tmp_path / "map.json"), "--record-expert-load", str(load)]
    command += ["--port", "0", "--max-total-tokens", "512", "--log-level", "warning", "--speculative-draft-model-quantization", "none"]
    config = config_of(tmp_path, TREE)
    config = replace(config, model=replace(config.model, load_format="dummy"))
    requests = asked(8, tokens=8)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ) as server:
        try:
            assert server.stdout is not None
            found = re.search(r"http://\S+", server.stdout.readline())
            assert found, server.communicate(timeout=PATIENCE)
            with ThreadPoolExecutor() as pool:
                answers = list(pool.map(lambda request: completed(found[0], request), requests))
            server.send_signal(signal.SIGTERM)
            _, log = server.communicate(timeout=PATIENCE)
        finally:
            server.kill()
    assert answers == alone(config, requests) and server.returncode == 0 and "Traceback" not in log
    counted = [json.loads(Path(f"{load}.{rank}").read_text()) for rank in range(4) if Path(f"{load}.{rank}").exists()]
    rows = [sum(sum(each[layer]) for each in counted) for layer in ("1", "2", "3")]
    # Of each row three experts; the MTP layer has rows of its own.
    assert rows[0] == rows[1] >= 3 * sum(len(request.prompt) for request in requests) and rows[2] > 0 and rows[0] % 3 == rows[2] % 3 == 0


def completed(url: str, request: Request) -> list[int]:
    body = {"prompt": request.prompt, "max_tokens": request.sampling.max_tokens, "ignore_eos": True, "seed": request.sampling.seed}
    body |= {"temperature": request.sampling.temperature}
    (choice,) = httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE).json()["choices"]
    return [int(token) for token in choice["text"].split()]


def test_each_engine_loads_its_own_experts(tmp_path: Path) -> None:
    glm4_moe(tmp_path)
    (tmp_path / "map.json").write_text(json.dumps({"2": [1, 0, 2, 1, 3, 3, 1, 2]}))
    whole = dict(loaded(config_of(tmp_path, CHAIN)).named_parameters())
    for rank in range(4):
        map_file = str(tmp_path / "map.json")
        config = config_of(tmp_path, CHAIN, data_parallel_size=4, enable_expert_parallel=True, expert_map=map_file)
        parts = dict(loaded(replace(config, replica=rank)).named_parameters())
        assert parts.keys() == whole.keys()
        mapped = [[1], [0, 3, 6], [2, 7], [4, 5]][rank]
        for name, part in parts.items():
            held = mapped if name.startswith("layers.2.") else [2 * rank, 2 * rank + 1]
            assert torch.equal(part, whole[name][held] if ".experts." in name else whole[name]), name


def loaded(config: EngineConfig) -> DecoderModel:
    found = describe(config, want_mtp=True)
    return load_model(found, torch.float32, torch.device("cpu"), 64, KERNELS.get("torch")(), False, Storage(False, torch.float32))


def test_each_engine_plans_for_its_own_experts(tmp_path: Path) -> None:
    deepseek(tmp_path)
    sizes = {}
    for engines in (1, 2, 4):
        memory = plan(config_of(tmp_path, CHAIN, data_parallel_size=engines, enable_expert_parallel=True)).memory
        sizes[engines] = dict(memory.rows)["weights"]
    each = 3 * 20 * 48 * 4  # bytes of an expert; two layers of the trunk have eight
    assert sizes[1] - sizes[2] == 2 * 4 * each and sizes[1] - sizes[4] == 2 * 6 * each


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (
            {"data_parallel_size": 2, "expert_parallel_size": 4},
            "--expert-parallel-size must be 1 or 2, the number of all engines' processes, got 4",
        ),
        (
            {"tensor_parallel_size": 4, "expert_parallel_size": 2},
            "--expert-parallel-size must be 1 or 4, the number of all engines' processes, got 2",
        ),
        (
            {"data_parallel_size": 4, "enable_dp_attention": True, "tensor_parallel_size": 6},
            "--tensor-parallel-size must be 1, or a multiple of --data-parallel-size, which is 4, with --enable-dp-attention, got 6",
        ),
        (
            {"expert_map": "x", "enable_expert_parallel": True},
            "--expert-map must be used with --enable-expert-parallel and several engines only",
        ),
    ],
)
def test_what_does_not_fit_together(options: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        ParallelConfig(**options)


def test_a_model_without_experts_and_one_with_too_few(tmp_path: Path) -> None:
    deepseek(tmp_path / "few", n_routed_experts=2, num_experts_per_tok=1)
    llama(tmp_path / "none")
    for model, engines, error in (
        ("none", 2, "--enable-expert-parallel spreads a model's experts, and this model has none"),
        ("few", 4, "--enable-expert-parallel needs an expert of each layer for each process: at most 2 processes, got 4"),
    ):
        config = config_of(
            tmp_path / model, SpecConfig(speculative_algorithm="none"), data_parallel_size=engines, enable_expert_parallel=True
        )
        with pytest.raises(ConfigError, match=error):
            plan(config)
