"""The GPU's profile without a GPU: every part at toy size, what a time limit leaves, the launches that are predicted, and the tables."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

from mtpserve.config import SpecConfig
from tests.kernels.interpreter import quicken
from tests.kernels.test_launches import Counting
from tests.runtime.test_overlap import CHAIN, PLAIN
from tests.tiny import tiny_engine, tiny_model

ROOT = Path(__file__).parents[2]
SCHEMA = ROOT / "benchmarks" / "gpu_kit" / "schema.json"


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


# Kernels are interpreted in less time; a limit of time is not what these runs are about.
PROFILE = """
import runpy
from tests.kernels.interpreter import quicken
quicken()
runpy.run_path("benchmarks/gpu_profile.py", run_name="__main__")
"""


def profile(*options: str) -> str:
    return output("-c", PROFILE, "--dry-run", "--seconds", "36000", *options)


def output(*command: str) -> str:
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "kernels", ROOT / "benchmarks")))
    process = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-2000:]
    return process.stdout


def result_of(file: Path) -> dict[str, Any]:
    """A result that its schema allows."""
    document = json.loads(file.read_text())
    jsonschema.validate(document, json.loads(SCHEMA.read_text()))
    assert file.stat().st_size < 2 << 20
    return dict(document["numbers"])


def test_ceilings(tmp_path: Path) -> None:
    stdout = profile("--models", "0.5b", "--parts", "ceilings", "--json", str(tmp_path / "out.json"))
    numbers = result_of(tmp_path / "out.json")
    assert numbers["env"]["interpreted"] and numbers["ceilings"]["read_gb_s"] > 0 and not numbers["skipped"]
    assert numbers.keys() & {"steps", "host", "tune", "check"} == set() and "ceilings: " in stdout


@pytest.mark.thorough  # interpreted: minutes on a busy machine
def test_steps_and_the_hosts_share(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    stdout = profile("--models", "0.5b", "--parts", "ceilings", "steps", "host", "--json", str(file))
    numbers = result_of(file)
    assert not numbers["skipped"] and not any(part["over_limit"] for part in numbers["parts"].values())
    assert numbers["env"]["interpreted"] and all(cell["clock"] == "host" for cell in numbers["steps"])
    plain, drafting, longer, prompts = numbers["steps"]
    assert (plain["rows"], drafting["rows"], longer["rows"], prompts["rows"]) == (1, 4, 1, 64)
    assert plain["launches"] == longer["launches"] < drafting["launches"] and plain["bytes"] < longer["bytes"] < prompts["bytes"]
    for cell in numbers["steps"]:
        assert cell["prediction"]["launches"] == pytest.approx(cell["launches"], rel=0.1)  # there is one processor less
        assert sum(row["calls"] for row in cell["kernels"]) == cell["kernel_launches"] == cell["launches"]
        assert {row["class"] for row in cell["kernels"]} == {"triton", "product", "torch"}
        assert all(row["us_sum"] >= row["us_max"] >= row["us_median"] > 0 for row in cell["kernels"])
    (host,) = numbers["host"]
    assert host["arrivals"] > 0 and host["eager_passes"] == 0
    assert host["median_ms"]["step"] >= host["median_ms"]["launch"] > 0 and host["median_ms"]["decode_graph"] > 0
    assert "0.5b k=3 batch 1" in stdout and "they say nothing of a GPU" in stdout
    beside = output("benchmarks/gpu_model.py", "--models", "0.5b", "--against", str(file))
    assert beside.startswith("measured ceilings") and beside.count("0.5b") == 4


@pytest.mark.thorough
def test_tilings_are_tuned_checked_and_written(tmp_path: Path) -> None:
    file, table = tmp_path / "out.json", tmp_path / "table.json"
    command = ["--models", "475m", "--parts", "tune", "check", "--json", str(file), "--write-tuned", str(table)]
    profile(*command)
    numbers, ops = result_of(file), json.loads(table.read_text())["ops"]
    assert numbers["check"] and all(check["good"] for check in numbers["check"])
    assert not numbers["skipped"]
    tuned = {(record["op"], record["shape"]) for record in numbers["tune"] if record["candidates"]}
    assert {op for op, _ in tuned} == {"gate_up", "down", "route", "span_mla", "skinny_linear", "add_rms_norm"}
    assert tuned >= {(op, shape) for op, shapes in ops.items() for shape in shapes}, "what was there is faster, or nothing was measured"
    assert {"linear_fp8", "compact", "span_mla"} <= {record["op"] for record in numbers["tune"]}


def launches_of(spec: Any, layers: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Of one step of a tiny model in DeepSeek-V3's layout, interpreted."""
    from mtpserve.core.request import Request
    from mtpserve.core.sampling import SamplingParams
    from mtpserve.runtime.graphs import graphs

    monkeypatch.setattr(graphs, "PROMPTS", ())
    recorder = Counting(monkeypatch)
    model = tiny_model("deepseek", kernels="triton", layers=layers)
    engine = tiny_engine(model, spec, backend="triton", page_size=16, recorder=recorder, seats=1)
    engine.add(Request("0", [3, 4, 5], SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)))
    while not recorder.counts:
        assert not any(event.error for event in engine.step())
    return recorder.counts[0].total()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[dict[str, Any]]]:
    """gpu_model.py: what it says, and its steps."""
    file = tmp_path_factory.mktemp("model") / "out.json"
    stdout = output("benchmarks/gpu_model.py", "--models", "475m", "7b", "--batches", "1", "--json", str(file))
    return stdout, json.loads(file.read_text())["steps"]


@pytest.mark.thorough  # test_launches.py counts the launches of steps
@pytest.mark.parametrize("spec", [PLAIN, CHAIN], ids=["plain", "drafting"])
@pytest.mark.skipif(torch.cuda.is_available(), reason="the tiny engine lives on the CPU: interpreted alone")
def test_predicted_launches_are_those_of_a_step(
    model: tuple[str, list[dict[str, Any]]], spec: SpecConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the 475 M with its 36 layers. Counted by other means: interpreted, with two layers and with three, so that a layer's are known."""
    quicken()
    drafts = 0 if spec is PLAIN else CHAIN.speculative_num_steps
    two, three = (launches_of(spec, layers, monkeypatch) for layers in (2, 3))
    (cell,) = [cell for cell in model[1] if (cell["model"], cell["drafts"], cell["context"], cell["prompt"]) == ("475m", drafts, 256, 0)]
    assert cell["prediction"]["launches"] == pytest.approx(two + 34 * (three - two), rel=0.1), (drafts, two, three)


@pytest.mark.thorough
def test_predicted_bytes_are_no_less_than_a_step_reads(model: tuple[str, list[dict[str, Any]]]) -> None:
    stdout, cells = model
    for cell in cells:
        if not cell["prompt"]:
            least = cell["floor_ms"] * 3000e6  # bytes at the stated speed
            assert 0.98 * least <= cell["prediction"]["bytes"] <= (4.5 if cell["model"] == "475m" else 1.1) * least, cell
    assert "stated ceilings" in stdout and "475m k=0 batch 1 context 256" in stdout


def result(tmp_path: Path, **shares: float) -> Any:
    from gpu_kit.report import Result

    return Result(tmp_path / "out.json", sum(shares.values()), shares)


def test_a_part_that_overruns_is_cut_and_what_it_measured_is_kept(tmp_path: Path) -> None:
    run = result(tmp_path, slow=0.3, next=0.2)
    numbers = run.numbers
    numbers["env"] = {"command": "python x.py", "commit": "abc", "device": "a CPU", "versions": {}}

    def slow(alarm: Any) -> Iterator[dict[str, Any]]:
        for number in range(1000):
            yield {"number": number}
            time.sleep(0.02)

    def after(alarm: Any) -> Iterator[dict[str, Any]]:
        with alarm.critical_section():
            yield {"number": -1}
        yield {"skipped": "one sentence"}
        raise RuntimeError("of the part")

    run.run("slow", slow, numbers.setdefault("steps", []).append)
    document = json.loads((tmp_path / "out.json").read_text())["numbers"]
    assert 1 < len(document["steps"]) < 100 and document["parts"]["slow"]["over_limit"] and "cut after" in document["skipped"][0]
    run.run("next", after, numbers.setdefault("host", []).append)
    assert numbers["host"] == [{"number": -1}] and not numbers["parts"]["next"]["over_limit"]
    assert numbers["skipped"][1:] == ["one sentence", "next: RuntimeError: of the part"]


def test_what_must_be_whole_is_cut_after_it(tmp_path: Path) -> None:
    run, ends = result(tmp_path, capture=0.1), []

    def capture(alarm: Any) -> Iterator[dict[str, Any]]:
        with alarm.critical_section():
            time.sleep(0.2)
            ends.append("whole")
        ends.append("never")
        yield {}

    run.run("capture", capture, lambda record: None)
    assert ends == ["whole"] and run.numbers["parts"]["capture"]["over_limit"]


def test_candidates_that_do_not_fit_the_chip_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from gpu_kit import tune
    from gpu_kit.calls import Call
    from gpu_kit.models import DeviceConfig
    from gpu_kit.timing import Alarm
    from gpu_kit.workloads import Workload
    from triton.runtime.errors import OutOfResources

    chosen: list[Any] = []

    def tile_us(device_config: Any, call: Any, op: str, tile: Any, alarm: Any) -> float:
        chosen.append(tile)
        if tile["BN"] == 128:
            raise OutOfResources(300 << 10, 227 << 10, "shared memory")
        return float(tile["BN"])

    monkeypatch.setattr(tune, "tile_us", tile_us)
    workload, call = Workload("down", "mixture", "a model", 4, (1,)), Call(lambda i: torch.zeros(1), lambda i: torch.zeros(1), 1e6)
    arguments = DeviceConfig(torch.device("cpu"), toy=True), workload, call
    records = tune.candidate_records(*arguments, [{"BN": 128}, {"BN": 64}, {"BN": 32}], Alarm(60.0))
    assert [record["tiling"]["BN"] for record in records] == [32, 64] and len(chosen) == 3
    with pytest.raises(LookupError, match="down of a model, 4 rows: no candidate runs: OutOfResources: out of resource: shared memory"):
        tune.candidate_records(*arguments, [{"BN": 128}], Alarm(60.0))


def test_a_capture_that_fails_is_ended_and_its_pool_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    from contextlib import nullcontext
    from types import SimpleNamespace

    from gpu_kit import timing

    calls: list[Any] = []
    stream = SimpleNamespace(wait_stream=lambda other: calls.append("wait"))
    graph: Any = SimpleNamespace(capture_begin=lambda pool: calls.append(("begin", pool)), capture_end=lambda: calls.append("end"))
    stand_ins = {
        "current_stream": lambda: stream, "stream": lambda stream: nullcontext(), "graph_pool_handle": lambda: (0, 7),
        "current_device": lambda: 0,
    }  # fmt: skip
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(timing, "capture_stream", lambda: stream)
    monkeypatch.setattr(timing, "FAILED_GRAPHS", [])
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda device, pool: calls.append(("release", pool)), raising=False)
    with timing.capture(graph, None):
        pass
    assert calls == ["wait", ("begin", (0, 7)), "end", "wait"] and not timing.FAILED_GRAPHS
    calls.clear()
    with pytest.raises(ValueError, match="of the body"), timing.capture(graph, timing.Alarm(60.0)):
        raise ValueError("of the body")
    failed_graphs = list(timing.FAILED_GRAPHS)
    assert calls == ["wait", ("begin", (0, 7)), "end", ("release", (0, 7))] and failed_graphs == [graph]


def test_jobs_compile_each_candidate_once() -> None:
    from gpu_kit.candidates import tiles_of
    from gpu_kit.precompile import TILES_OF_JOB, distinct_kernels
    from gpu_kit.workloads import prompt_workloads, workloads_of

    workloads = workloads_of(["475m"], toy=False)
    jobs = distinct_kernels([*workloads, *prompt_workloads(["475m"], toy=False)])
    assert all(0 < len(tiles) <= TILES_OF_JOB for _, tiles in jobs)
    down_tiles = [tile for workload, tiles in jobs if workload.op == "down" and workload.rows <= 16 for tile in tiles]
    down = next(workload for workload in workloads if workload.op == "down")
    assert down_tiles == [None, *tiles_of(down)], "16 rows and fewer have the same kernels"
    assert [tiles for workload, tiles in jobs if workload.label == "475m prompt of 512"] == [[None]]


def test_a_stub_of_the_driver_can_be_linked_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import ctypes

    from gpu_kit.precompile import stub_driver

    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    for name in ("CC", "LD_LIBRARY_PATH", "TRITON_LIBCUDA_PATH"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    stub_driver(tmp_path)
    assert os.environ["TRITON_LIBCUDA_PATH"] == os.environ["LD_LIBRARY_PATH"] == str(tmp_path)
    assert ctypes.CDLL(str(tmp_path / "libcuda.so.1")).cuModuleLoadData() == 999


def test_replays_of_a_graph_are_told_apart() -> None:
    from gpu_kit.kernel_table import Event, replays_of

    def events(*names: str) -> list[Event]:
        return [Event(name, 10.0 * i, 10.0 * i + 2) for i, name in enumerate(names)]

    restored = "Memcpy DtoD (Device -> Device)", "Memcpy DtoD (Device -> Device)", "norm_kernel", "Memcpy DtoD (Device -> Device)"
    assert [[event.name for event in replay] for replay in replays_of(events(*restored, *restored), 2)] == [list(restored[2:])] * 2
    for names, reason in ((restored[1:] + restored, "7 kernels in 2"), ((), "0 kernels"), (("a", "b"), "different kernels")):
        with pytest.raises(RuntimeError, match=reason):
            replays_of(events(*names), 2)


def test_kernels_find_their_launches() -> None:
    from gpu_kit.kernel_table import Event, table
    from gpu_kit.launches import PRODUCT, TORCH, TRITON, Launch

    def launch(name: str, kind: str, depth: int = 0) -> Launch:
        return Launch(name, kind, "", 1, 1000.0 * max(depth, 1), 0.0, (1,), product=(1, 64, depth, 1) if depth else (0, 0, 0, 0))

    launches = [
        launch("norm_kernel", TRITON),
        launch("mm", PRODUCT, 2),
        launch("cat", TORCH),
        launch("mm", PRODUCT, 3),
        launch("span_kernel", TRITON),
    ]
    names = ["norm_kernel", "nvjet_tst_64x8", "splitKreduce_kernel", "CatArrayBatchedCopy", "gemvNSP_kernel", "span_kernel", "Memcpy DtoD"]
    replays = [[Event(name, start + 10.0 * i, start + 10.0 * i + 4 + i, (1,)) for i, name in enumerate(names)] for start in (0.0, 500.0)]
    rows = {row["name"]: row for row in table(replays, launches, 2.0)}
    assert {name: rows[name]["shape"] for name in names[1:3] + names[4:5]} == {names[1]: "1 x 64 x 2", names[2]: "", names[4]: "1 x 64 x 3"}
    assert rows["gemvNSP_kernel"]["bytes"] == 3000 and rows["gemvNSP_kernel"]["read_share"] == pytest.approx(3000 / 8 / 1e3 / 2)
    assert rows["splitKreduce_kernel"]["class"] == "product" and rows["splitKreduce_kernel"]["bytes"] is None, "its product's, not its own"
    assert rows["CatArrayBatchedCopy"]["bytes"] == 1000 and rows["Memcpy DtoD"]["bytes"] is None, "nothing was launched for it"
    assert rows["norm_kernel"]["gap_before_us"] is None and rows["span_kernel"]["gap_before_us"] == 2.0


def test_a_profilers_trace_is_read_in_the_order_of_the_device() -> None:
    from gpu_kit.kernel_table import Event, events_of

    def entry(name: str, start: float, category: str = "kernel", **facts: Any) -> dict[str, Any]:
        return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": 2.0, "args": facts}

    facts = {"grid": [3, 1, 1], "registers per thread": 40, "shared memory": 512}
    trace = [
        entry("second", 7.0),
        entry("first", 3.0, **facts),
        entry("copy", 9.0, "gpu_memcpy"),
        entry("host", 0.0, "cuda_runtime"),
        {"ph": "M"},
    ]
    first, *others = events_of({"traceEvents": trace})
    assert first == Event("first", 3.0, 5.0, (3, 1, 1), 40, 512) and [event.name for event in others] == ["second", "copy"]


def test_lines_of_a_result() -> None:
    from gpu_kit.tables import predictions, summary

    cell = {"model": "7b", "drafts": 0, "requests": 1, "context": 256, "prompt": 0, "clock": "device", "launches": 2, "kernel_launches": 2,
            "device_ms": 8.0, "busy_ms": 7.0, "gap_ms": 1.0, "gap_us_median": 2.0, "host_replay_ms": 0.1, "floor_ms": 4.0}  # fmt: skip
    row = {
        "name": "slow_kernel",
        "shape": "4",
        "calls": 2,
        "us_median": 3.0,
        "us_sum": 6.0,
        "bytes": 2e6,
        "read_share": 0.3,
        "gap_before_us": 2.0,
    }
    prediction = {"launches": 2, "bytes": 1e9, "body_ms": 5.0, "gap_ms": 1.0, "device_ms": 6.0}
    cell |= {"kernels": [row, row | {"name": "good_kernel", "us_sum": 1.0}], "prediction": prediction}
    tuned = {
        "op": "down",
        "label": "7b down",
        "rows": 4,
        "default_us": 5.0,
        "best_us": 3.0,
        "best": {"BN": 16},
        "candidates": [0],
        "library_us": {},
    }
    check = {"op": "down", "shape": "E4", "label": "", "tiling": {"BN": 16}, "error": 0.5, "limit": 0.01, "good": False}
    result = {"steps": [cell], "ceilings": {"read_gb_s": 1000.0}, "skipped": ["a sentence"], "tune": [tuned], "check": [check]}
    lines = summary(result)
    assert "check failed: down E4 {'BN': 16}: error 0.5, at most 0.01" in lines
    assert any(line.split()[:3] == ["down", "7b", "down,"] and line.endswith("5.00     3.00           -    BN16") for line in lines), lines
    assert lines[0] == "skipped: a sentence" and lines[-1].startswith(
        "prediction missed: 7b k=0 batch 1 context 256: 6.00 ms predicted, 8.00"
    )
    slow, good = (next(line for line in lines if name in line) for name in ("slow_kernel", "good_kernel"))
    assert lines.index(slow) < lines.index(good) and "4.0" in slow
    assert "-25%" in predictions([cell])[1]
