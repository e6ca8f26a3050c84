"""What keeps an engine from starting, found as early as it can be; and the try-out at the end, of which nothing remains."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mtpserve.config import CacheConfig, EngineConfig, ModelConfig
from mtpserve.core.errors import LoadError
from mtpserve.engine.startup import compute
from mtpserve.engine.startup.start import build_engine, try_out
from mtpserve.spec.counts import new_stats
from tests.engine.harness import REFERENCE, Bench
from tests.runtime.recorders import Again
from tests.tiny import tiny_engine, tiny_model

SHARD = "model-00003-of-00003.safetensors"


@pytest.fixture
def demo(tmp_path: Path) -> Path:
    return Path(shutil.copytree(ModelConfig().directory, tmp_path / "demo"))


def test_half_a_file_is_refused_before_torch_is_imported(demo: Path) -> None:
    content = (demo / SHARD).read_bytes()
    (demo / SHARD).write_bytes(content[: len(content) // 2])
    code = f"""
import sys
from mtpserve.config import EngineConfig, ModelConfig
from mtpserve.core.errors import LoadError
from mtpserve.engine.process.process import DEFAULT_FACTORY, load_factory

try:
    load_factory(DEFAULT_FACTORY)(EngineConfig(model=ModelConfig(model={str(demo)!r})), progress=False)
except LoadError as error:
    print(error, "torch" in sys.modules)
"""
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout
    assert told.startswith(f"{demo / SHARD}: is truncated: ") and told.endswith(" False\n")


def test_finite_weights_that_give_no_numbers_are_refused(demo: Path) -> None:
    (shard,) = (file for file in demo.glob("*.safetensors") if "model.norm.weight" in load_file(file))
    tensors = load_file(shard)
    tensors["model.norm.weight"].fill_(3e38)  # as a flipped bit of the exponent makes it
    save_file(tensors, shard)
    with pytest.raises(LoadError, match=r"cannot compute a token.*damaged.*non-finite"):
        build_engine(EngineConfig(model=ModelConfig(model=str(demo)), cache=CacheConfig(max_total_tokens=1024)))


@pytest.mark.parametrize("fault", ["numbers", "raises", "refused"])
def test_an_engine_that_computes_nothing_does_not_start(fault: str) -> None:
    bench = Bench()
    bench.runner.raise_at = {2} if fault == "raises" else set()
    bench.runner.fail_ids = {"try out 0"} if fault == "numbers" else set()
    bench.runner.refuse_ids = {"try out 0"} if fault == "refused" else set()
    with pytest.raises(LoadError, match={"numbers": "NaN", "raises": "RuntimeError", "refused": "ValueError"}[fault]):
        try_out(bench.engine)


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("context", [2, 200])
def test_trying_out_leaves_nothing(context: int, overlap: int) -> None:
    bench = Bench(overlap=overlap, context=context)
    try_out(bench.engine)
    assert bench.runner.steps and not bench.engine.has_work
    assert bench.engine.stats == replace(new_stats(3, 200), weight_version="default")
    bench.engine.check_integrity()
    if context == 200:
        bench.add("r3")
        bench.drain()
        assert bench.texts["r3"] == REFERENCE["r3"]


def test_trying_out_draws_no_seed() -> None:
    texts = []
    for tried in (False, True):
        bench = Bench(noisy=True, drafts=0, random_seed=7)
        if tried:
            try_out(bench.engine)
        bench.add("a", prompt=[1, 2])
        bench.drain()
        texts.append(bench.texts["a"])
    assert texts[0] == texts[1]


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize(
    ("budget", "context", "lengths"), [(32, 200, [1, 2, 4, 8, 16, 32]), (24, 200, [1, 2, 4, 8, 16, 24]), (32, 12, [1, 2, 4, 8, 11])]
)
def test_where_kernels_are_compiled_all_sizes_are_met_at_start(budget: int, context: int, lengths: list[int], overlap: int) -> None:
    bench = Bench(overlap=overlap, budget=budget, context=context, running=6)
    try_out(bench.engine, compiles=True)
    chunks = [[length for _, start, length, _ in spans if start == 0] for spans in bench.runner.steps]
    alone = [new[0] for new in chunks if len(new) == 1]
    assert alone[: 1 + len(lengths)] == [1, *lengths], "every chunk that a real prompt may be cut into, rounded to a power of two"
    decoding = {len(spans) for spans in bench.runner.steps if all(start > 0 for _, start, _, _ in spans)}
    assert decoding >= {1, 2, 4, 6}
    assert bench.engine.stats == replace(new_stats(3, 200), weight_version="default") and not bench.engine.has_work
    bench.engine.check_integrity()


def test_without_a_compiler_a_few_tokens_are_enough() -> None:
    bench = Bench()
    try_out(bench.engine)
    assert sum(length for spans in bench.runner.steps for _, _, length, _ in spans) <= 4


@pytest.mark.parametrize(
    ("backend", "interpreted", "expected"), [("reference", False, False), ("triton", True, False), ("triton", False, True)]
)
def test_who_compiles(backend: str, interpreted: bool, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute, "device_of", lambda config: torch.device("cpu" if interpreted or backend == "reference" else "cuda"))
    monkeypatch.setenv("TRITON_INTERPRET", "1" if interpreted else "0")
    assert compute.compiles(EngineConfig(model=ModelConfig(attention_backend=backend))) is expected


@pytest.mark.parametrize("eos", [(), (3,)])
def test_what_is_launched_at_start_is_not_replayed(eos: tuple[int, ...]) -> None:
    """Graphs have been tried by their captures; what runs beside them has not."""
    recorder = Again()
    engine = tiny_engine(tiny_model(), 3, recorder=recorder, eos=eos, seats=4)
    try_out(engine)
    before = list(recorder.replayed)
    assert before
    try_out(engine, compiles=True)
    assert len(recorder.replayed) == 2 * len(before)
