"""peers/gpu.py without a GPU and without vLLM: arms and waves at toy size, bounds, the payload's parts, and the tables of results."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import jsonschema
import msgspec
import pytest

ROOT = Path(__file__).parents[2]
PEERS = ROOT / "benchmarks" / "peers"
SCHEMA = PEERS / "gpu_engines" / "schema.json"
# One token for each request and step, and with drafts two.
VLLM = """
import importlib.util
from types import SimpleNamespace as Of
from vllm.sampling_params import RequestOutputKind
__version__ = "0.26"
# transformers looks for this name: benchmarks/kernels.py is not to be found.
assert importlib.util.find_spec("kernels") is None
class SamplingParams(Of):
    pass
class Engine:
    def __init__(self, drafts):
        self.new, self.left = 1 + bool(drafts), {}
        cache = Of(cudagraph_mode="FULL")
        self.vllm_config = Of(scheduler_config=Of(async_scheduling=True, max_num_batched_tokens=99), compilation_config=cache)
    def add_request(self, request_id, prompt, params):
        assert params.ignore_eos and not params.temperature and params.output_kind is RequestOutputKind.DELTA
        assert len(prompt["prompt_token_ids"]) == 12
        self.left[request_id] = params.max_tokens
    def step(self):
        outputs = []
        for name, left in list(self.left.items()):
            tokens = min(left, self.new)
            self.left[name] -= tokens
            outputs.append(Of(request_id=name, outputs=[Of(token_ids=[7] * tokens)], finished=left == tokens))
            if left == tokens:
                del self.left[name]
        return outputs
    def has_unfinished_requests(self):
        return bool(self.left)
    def abort_request(self, names):
        for name in names:
            self.left.pop(name, None)
class LLM:
    def __init__(self, load_format, speculative_config=None, **arguments):
        assert load_format == "dummy" and arguments["kv_cache_memory_bytes"] > 0
        self.llm_engine = Engine((speculative_config or {}).get("num_speculative_tokens"))
"""
KINDS = "class RequestOutputKind:\n    DELTA = 1\n"


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


@pytest.fixture
def site(tmp_path: Path) -> Path:
    package = tmp_path / "stage" / "site" / "vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(VLLM)
    (package / "sampling_params.py").write_text(KINDS)
    return package.parent


@pytest.mark.thorough  # five engines in processes of their own
def test_the_payload_runs_all_engines_at_toy_size(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By run.sh, with a payload whose vLLM is the one above, which the check of its libraries refuses."""
    from common import gpu_tables
    from peers.gpu_engines.record import KIND, Record
    from peers.gpu_payload.build import ARCHIVE, pack, split

    (tmp_path / "bin").mkdir()
    (tmp_path / "payload").mkdir()
    (tmp_path / "bin" / "nvidia-smi").write_text("#!/bin/sh\n")
    (tmp_path / "bin" / "nvidia-smi").chmod(0o755)
    pack(site, tmp_path / "payload" / ARCHIVE)
    assert len(split(tmp_path / "payload" / ARCHIVE, 500)) > 1
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PYTHON": sys.executable, "PEERS_HOME": str(tmp_path / "home"), "PATH": path}
    result = tmp_path / "peers_gpu_toy.json"
    command = ["bash", str(PEERS / "gpu_payload" / "run.sh"), str(tmp_path / "payload"), "--dry-run", "--json", str(result)]
    command += ["--models", "mimo-7b", "--drafts", "0", "3", "--batches", "1", "2", "--logs", str(tmp_path / "logs")]
    refusal = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert refusal.returncode == 1 and "do not compute here what they should" in refusal.stderr and not result.exists()
    process = subprocess.run(command, env=environment | {"UNCHECKED": "1"}, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-2000:]

    content = json.loads(result.read_text())
    assert {"command", "commit", "device", "versions"} <= content.keys()
    jsonschema.validate(content["numbers"], json.loads(SCHEMA.read_text()))
    record = msgspec.convert(content["numbers"], Record)
    assert (record.kind, record.toy, record.skipped, record.read_bandwidth_source) == (KIND, True, [], "measured")
    arms = [("mtpserve", 0), ("vllm", 0), ("loop", 0), ("mtpserve", 3), ("vllm", 3)]
    assert sorted((row.engine, row.drafts, row.batch) for row in record.rows) == sorted((*arm, batch) for arm in arms for batch in (1, 2))
    assert sorted((start.engine, start.drafts) for start in record.starts) == sorted(arms)
    for row in record.rows:
        accept_length = {("mtpserve", 3): None, ("vllm", 3): 2.0}.get((row.engine, row.drafts), 1.0)
        assert 1 < row.accept_length < 4 if accept_length is None else row.accept_length == accept_length
        assert row.partial_steps == 0 and row.context > 12 and 0 < row.least_tokens_per_s <= row.tokens_per_s <= row.most_tokens_per_s
        assert row.bound_ms == pytest.approx(1e3 * row.step_bytes / record.read_bandwidth)
        assert row.steady_tokens_per_s == pytest.approx(1e3 * row.batch * row.accept_length / row.step_ms)
    assert gpu_tables.results(tmp_path) == [], "a dry run is no result"
    assert "mimo-7b k=3 batch 2" in process.stdout and "torch.compile loop" in process.stdout


def test_a_worker_needs_the_standard_library_and_its_engine_alone(site: Path) -> None:
    read_end, write_end = os.pipe()
    numbers = {"prompt": 12, "output": 6, "repeats": 1, "warm": 1, "timed": 2, "kv-bytes": 1000, "events": write_end}
    command = [sys.executable, "-S", str(PEERS / "gpu_engines" / "worker.py"), "vllm", "qwen3-8b", "0", "--batches", "2", "--toy"]
    command += [word for name, number in numbers.items() for word in (f"--{name}", str(number))]
    process = subprocess.run(
        command, env={"PYTHONPATH": str(site)}, input="go\n", pass_fds=(write_end,), capture_output=True, text=True, check=False
    )
    os.close(write_end)
    with os.fdopen(read_end) as events:
        ready, row, end = map(json.loads, events)
    assert process.returncode == 0, process.stderr
    assert ready["ready"]["settings"]["version"] == "0.26" and end == {"done": True}
    assert (row["row"]["batch"], row["row"]["accept_length"], row["row"]["bound_ms"]) == (2, 1.0, None)


def test_the_schema_is_that_of_the_record() -> None:
    from peers.gpu_engines.record import Record

    assert json.loads(SCHEMA.read_text()) == msgspec.json.schema(Record)


def test_vllm_gets_the_same_load() -> None:
    from peers.gpu_engines.load import Sizes, acceptance_rates
    from peers.gpu_engines.vllm_engine import llm_arguments

    arguments = llm_arguments(Path("model"), 3, Sizes((1, 8)), 1 << 30, {"max_num_seqs": 9})
    assert arguments["compilation_config"] == {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32]}
    assert arguments["speculative_config"]["num_speculative_tokens"] == 3 and arguments["max_num_seqs"] == 9
    assert 1 + sum(acceptance_rates(3)) == pytest.approx(2.99) and acceptance_rates(1) == pytest.approx([0.84])
    assert "speculative_config" not in llm_arguments(Path("model"), 0, Sizes((1,)), 1, {})


def test_the_loop_decodes_what_full_attention_does(tmp_path: Path) -> None:
    """With a static cache, step by step, against the whole text at once."""
    import torch
    from peers.gpu_engines.load import Sizes
    from peers.gpu_engines.shapes import shape
    from peers.gpu_engines.torch_loop import TorchLoop

    for model in ("qwen3-8b", "mimo-7b"):
        (tmp_path / "config.json").write_text(json.dumps(shape(model, toy=True)))
        loop = TorchLoop(tmp_path, 0, Sizes((2,), prompt=5, output=4, warm=1, timed=1), 0, {})
        texts = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]]
        for i, text in enumerate(texts):
            loop.add(str(i), list(text), 4)
        while loop.has_unfinished_requests:
            assert loop.step() == {"0": 1, "1": 1}
            assert loop.state is not None
            for text, token in zip(texts, loop.state.token.tolist(), strict=True):
                text.append(token)
        with torch.inference_mode():
            for end in range(5, 9):
                loop.prefill(loop.state_of(2), [text[:end] for text in texts])
                assert loop.state_of(2).token.tolist() == [text[end] for text in texts], (model, end)
        with pytest.raises(ValueError, match="got 1 drafts"):
            TorchLoop(tmp_path, 1, Sizes((1,)), 0, {})


def test_bounds_are_those_of_hand_counts() -> None:
    from common.shapes import StepBytes
    from peers.gpu_engines.shapes import SHAPES, kv_bytes, weight_bytes

    small = StepBytes(SHAPES["qwen2.5-0.5b"])
    layer = 896 * 896 * 2 + 896 * 128 * 2 + 3 * 896 * 4864  # q and o, k and v, gate and up and down
    assert small.step(1, 0, 0) == 2 * (24 * layer + 896 * 151936)
    assert small.step(8, 100, 0) - small.step(8, 0, 0) == 8 * 100 * 24 * 2 * 128 * 2
    assert (kv_bytes(SHAPES["qwen2.5-0.5b"], 0), weight_bytes(SHAPES["qwen2.5-0.5b"])) == (12288, small.step(1, 0, 0))
    mimo = StepBytes(SHAPES["mimo-7b"])
    layer = 4096 * 4096 * 2 + 4096 * 1024 * 2 + 3 * 4096 * 11008
    draft_pass = layer + 2 * 4096 * 4096 + 4096 * 151680
    assert mimo.step(64, 0, 3) == 2 * (36 * layer + 4096 * 151680 + 3 * draft_pass)
    assert kv_bytes(SHAPES["mimo-7b"], 1) == 37 * 2 * 8 * 128 * 2
    assert weight_bytes(SHAPES["qwen3-8b"]) == pytest.approx(2 * 8.19e9, rel=1e-3)  # 8.2 billion are published


def test_waves_are_as_large_as_the_memory(capsys: pytest.CaptureFixture[str]) -> None:
    from peers import gpu
    from peers.gpu_engines.waves import plan

    args = gpu.arguments(["--vllm", sys.executable])
    arms = gpu.all_arms(args)
    assert len(arms) == 13 and [arm.name for arm in arms[:4]] == [
        "mtpserve:qwen2.5-0.5b:0",
        "vllm:qwen2.5-0.5b:0",
        "loop:qwen2.5-0.5b:0",
        "mtpserve:mimo-7b:0",
    ]
    assert [len(wave) for wave in plan(arms, lambda arm: 30.0, 70.0)] == [2, 2, 2, 2, 2, 2, 1]
    assert [len(wave) for wave in plan(arms[:3], lambda arm: 100.0, 70.0)] == [1, 1, 1]
    assert {arm.name for arm in gpu.all_arms(gpu.arguments(["--engines", "loop"]))} == {f"loop:{model}:0" for model in gpu.SHAPES}
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--vllm", "/no/python"], "--vllm must be a Python interpreter, got /no/python"),
        (["--engines", "vllm"], "--vllm PYTHON is needed to measure vllm, got none"),
        (["--wave", "vllm:mimo-7b:1"], "--vllm PYTHON is needed"),
        (["--wave", "loop:mimo-7b:1"], "loop:mimo-7b can have at most 0 drafts, got loop:mimo-7b:1"),
        (["--wave", "mtpserve:mimo-7b:4"], "mtpserve:mimo-7b can have at most 3 drafts, got mtpserve:mimo-7b:4"),
        (["--wave", "mtpserve:other:1"], "an arm is ENGINE:MODEL:DRAFTS with mtpserve, vllm, loop and"),
        (["--drafts", "4"], "--drafts must be in [0, 3], got 4"),
        (["--batches", "0"], "--batches must be at least 1, got 0"),
        (["--seconds", "0"], "--seconds must be more than 0, got 0"),
        (["--kv-gib", "-1"], "--kv-gib must be more than 0, got -1"),
        (["--vllm-options", "[1]"], "must be a JSON object, got [1]"),
        (["--mtpserve-options", "{"], "is not valid JSON"),
        (["--json", "/no/folder/x.json"], "--json must be in a folder that exists, got /no/folder/x.json"),
    ],
)
def test_bad_arguments_get_one_line(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    from peers import gpu

    with pytest.raises(SystemExit):
        gpu.arguments(argv)
    assert message in capsys.readouterr().err.splitlines()[-1]


# What a worker says on its events, `fd`, and how it ends.
ROW = {
    "engine": "mtpserve", "model": "mimo-7b", "drafts": 0, "batch": 1, "tokens_per_s": 200.0, "least_tokens_per_s": 190.0,
    "most_tokens_per_s": 210.0, "step_ms": 4.0, "steady_tokens_per_s": 250.0, "accept_length": 1.0, "partial_steps": 0, "context": 192.0,
    "step_bytes": 3e9,
}  # fmt: skip
READY = {"engine": "mtpserve", "model": "mimo-7b", "drafts": 0, "seconds": 1.0, "settings": {"version": "1"}}
SAY = f"""
import os, sys, time
events = os.fdopen(int(sys.argv[2]), 'w', buffering=1)
say = lambda line: print(line, file=events)
ready, row = {json.dumps({"ready": READY})!r}, {json.dumps({"row": ROW})!r}
"""
WORKERS = {
    0: "say(ready); sys.stdin.readline(); say(row); say('{\"done\": true}')",
    1: "print('x\\nValueError: no drafts here\\nbye'); sys.exit(1)",
    2: "say(ready); sys.stdin.readline(); say(row); os.abort()",
    3: "say(ready); sys.stdin.readline(); time.sleep(60)",
}


def test_a_worker_that_dies_or_is_late_leaves_a_sentence(tmp_path: Path) -> None:
    from peers.gpu_engines.record import Arm
    from peers.gpu_engines.waves import Measurements, Waves

    row_counts: list[int] = []
    measurements = Measurements(lambda: row_counts.append(len(measurements.rows)))
    arms = [Arm("mtpserve", "mimo-7b", drafts) for drafts in WORKERS]

    def waves(seconds: float, min_seconds: float) -> Waves:
        command = [sys.executable, "-S", "-c"]
        return Waves(lambda arm: [*command, SAY + WORKERS[arm.drafts]], tmp_path, time.monotonic() + seconds, min_seconds)

    waves(60, 1).run(arms[:3], measurements)
    assert len(measurements.rows) == len(measurements.starts) == 2, "what was measured before stays"
    assert sorted(arm.reason for arm in measurements.skipped) == [
        "mtpserve:mimo-7b:1 ended by itself: ValueError: no drafts here",
        "mtpserve:mimo-7b:2 ended by itself: it said nothing",
    ]
    assert row_counts[-1] == 2
    waves(0.5, 0).run(arms[3:], measurements)
    assert measurements.skipped[-1].reason == "mtpserve:mimo-7b:3 was not done when the time was over"
    waves(5.2, 60).run(arms[:1], measurements)
    assert measurements.skipped[-1].reason == "mtpserve:mimo-7b:0 was not started: 5 s were left"


def entry_bytes(kind: int, arch: int, payload: bytes) -> bytes:
    header = bytearray(64)
    struct.pack_into("<HHIQ", header, 0, kind, 1, 64, len(payload))
    struct.pack_into("<I", header, 28, arch)
    return bytes(header) + payload


def fat_binary(*entries: bytes) -> bytes:
    content = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(content)) + content


def elf(*kernels: str) -> bytes:
    """As much of an ELF as has names of sections."""
    names = b"\0.shstrtab\0" + b"".join(f".text.{kernel}\0".encode() for kernel in kernels)
    places = [names.index(f".text.{kernel}\0".encode()) for kernel in kernels]
    sections = [struct.pack("<IIQQQQ16x8x", place, 1, 0, 0, 0, 0) for place in (0, *places)]
    offset = 64 + len(names)
    sections.append(struct.pack("<IIQQQQ16x8x", 1, 3, 0, 0, 64, len(names)))
    header = (
        b"\x7fELF".ljust(0x28, b"\0") + struct.pack("<Q", offset) + bytes(10) + struct.pack("<HHH", 64, len(sections), len(sections) - 1)
    )
    return header.ljust(64, b"\0") + names + b"".join(sections)


def test_gpu_code_of_other_architectures_and_names_goes() -> None:
    from peers.gpu_payload import fatbin

    mainloop, large_mainloop, helper = elf("_Z3fooILi128EECollectiveMainloop"), elf("_Z3fooILi256EECollectiveMainloop"), elf("combine")
    pieces = [
        fat_binary(entry_bytes(2, 80, b"a" * 40), entry_bytes(1, 90, b"ptx" * 5), entry_bytes(2, 90, mainloop)),
        fat_binary(entry_bytes(2, 90, large_mainloop), entry_bytes(2, 100, b"b" * 8)),
        fat_binary(entry_bytes(2, 90, helper)),
        fat_binary(entry_bytes(1, 90, b"c" * 8)),
    ]
    data = bytearray(b"code before " + b" between ".join(pieces) + b" code after")
    size, begins = len(data), [binary.begin for binary in fatbin.fat_binaries(data)]
    placeholder = fatbin.smallest_other(bytes(data), (90,))
    assert placeholder == entry_bytes(2, 100, b"b" * 8)
    report = fatbin.slim(data, (90,), "128.*Mainloop", placeholder)
    binaries = list(fatbin.fat_binaries(data))
    assert (len(data), [binary.begin for binary in binaries]) == (size, begins), "nothing moves"
    payloads = [[(entry.kind, entry.arch, bytes(data[entry.begin + 64 : entry.end])) for entry in binary.entries] for binary in binaries]
    assert payloads == [[(2, 90, mainloop)], [(2, 100, b"b" * 8)], [(2, 90, helper)], [(2, 100, b"b" * 8)]]
    assert (report.kept_bytes, report.num_binaries, report.num_emptied) == (len(mainloop) + len(helper), 4, 2)
    assert data.startswith(b"code before ") and data.endswith(b" code after") and b"a" * 40 not in data and b"ptx" not in data
    with pytest.raises(ValueError, match="no machine code for architectures other than 90, 100"):
        fatbin.smallest_other(bytes(data), (90, 100))
    with pytest.raises(ValueError, match="no entry of a fat binary at 0x10"):
        list(fatbin.fat_binaries(fat_binary(bytes(64))))
    with pytest.raises(ValueError, match="compressed machine code"):
        fatbin.slim(bytearray(fat_binary(entry_bytes(2, 90, b"zz"))), (90,), "x", b"")


def test_the_payload_has_what_is_used(tmp_path: Path) -> None:
    from peers.gpu_payload.build import BASE, LIBRARIES, WHEELS, unpack

    files = ["vllm/engine.py", BASE, "vllm-1.dist-info/METADATA"]
    unused_files = [
        "vllm/vllm-rs",
        "vllm/_other.abi3.so",
        "vllm/tests/x.py",
        "vllm/a.cuh",
        "vllm-1.dist-info/RECORD",
        "vllm/third_party/deep_gemm/x.py",
    ]
    with zipfile.ZipFile(tmp_path / "vllm-1-py3-none-any.whl", "w") as wheel:
        for name in (*files, *unused_files):
            wheel.writestr(name, "x")
    unpack(tmp_path / "vllm-1-py3-none-any.whl", tmp_path / "site", LIBRARIES)
    unpacked_files = {str(file.relative_to(tmp_path / "site")) for file in (tmp_path / "site").rglob("*") if file.is_file()}
    assert unpacked_files == set(files)
    pins = dict(line.split("==") for line in WHEELS.read_text().split())
    assert {"msgspec", "pyzmq"} <= pins.keys() and all(pins.values())
