"""The servers that are compared: their command lines, starting, waiting until ready, stopping, and what their metrics say of drafts."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
CONTEXT = 2048  # tokens of prompt and output together
MTP = {"method": "mtp", "num_speculative_tokens": 3}
START_LIMIT, STOP_LIMIT = 900, 60  # seconds
TCMALLOC = ("/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4", "/usr/lib64/libtcmalloc_minimal.so.4")
# Counters since the server's start: verifications with drafts, accepted drafts.
COUNTERS = {
    "drafts": ("mtpserve_spec_drafts_total", "vllm:spec_decode_num_drafts_total"),
    "accepted": ("mtpserve_spec_accepted_tokens_total", "vllm:spec_decode_num_accepted_tokens_total"),
}


@dataclass(frozen=True, slots=True)
class Server:
    name: str
    command: list[str]  # before the model
    options: list[str]
    environment: dict[str, str] = field(default_factory=dict)

    def line(self, model: Path, port: int, mode: str) -> list[str]:
        """What both understand has vLLM's names, in which mtpserve can be asked too."""
        spec = ["--speculative-config", json.dumps(MTP)] if mode == "mtp" else []
        shared = ["--max-model-len", str(CONTEXT), "--max-num-seqs", "64", "--served-model-name", "model", "--host", "127.0.0.1"]
        return [*self.command, str(model), "--port", str(port), *shared, *self.options, *spec]

    def described(self) -> dict[str, Any]:
        """What distinguishes it, without this machine's paths."""
        preloaded = [Path(path).name for path in self.environment.get("LD_PRELOAD", "").split(":") if path]
        bind = self.environment.get("VLLM_CPU_OMP_THREADS_BIND")
        return {"name": self.name, "options": self.options, "preloaded": preloaded, "bound_to": bind}


def mtpserve(dtype: str, options: list[str]) -> Server:
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "kernels")))
    command = [sys.executable, "-m", "mtpserve", "launch"]
    return Server("mtpserve", command, ["--dtype", dtype, "--max-total-tokens", "16384", *options], {"PYTHONPATH": paths})


def vllm(binary: Path, dtype: str, cached: bool, bind: str, cache: Path) -> Server:
    """`binary`: the venv's python, or its `vllm`. As vLLM's documentation advises, Intel's OpenMP and, if installed, tcmalloc are
    preloaded. By default vLLM keeps one core free of OpenMP threads, which on two cores is half of them: `bind` says which it uses."""
    prefix = binary.parent.parent
    preloaded = [path for path in TCMALLOC if Path(path).exists()][:1] + [str(path) for path in prefix.glob("lib/libiomp5.so")]
    environment = {
        "LD_PRELOAD": ":".join(preloaded), "VLLM_CPU_OMP_THREADS_BIND": bind, "VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_CACHE_ROOT": str(cache),
        "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    command = [str(prefix / "bin" / "python"), "-m", "vllm.entrypoints.cli.main", "serve"]
    options = ["--dtype", dtype, "--enable-prompt-tokens-details", "--enable-prefix-caching" if cached else "--no-enable-prefix-caching"]
    return Server(f"vllm {dtype}, prefix cache" if cached else f"vllm {dtype}", command, options, environment)


def versions(binary: Path) -> dict[str, str]:
    code = "import importlib.metadata as m, json; print(json.dumps({n: m.version(n) for n in ('vllm', 'torch', 'transformers')}))"
    python = binary.parent / "python"
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout))


@dataclass(slots=True)
class Running:
    port: int
    process: subprocess.Popen[bytes]
    log: Path
    health_seconds: float = 0.0  # from the start until /health answers 200
    first_seconds: float = 0.0  # until the first completion has returned

    def get(self, path: str, body: dict[str, Any] | None = None, timeout: float = 10) -> str:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return str(answer.read().decode())

    def healthy(self) -> bool:
        try:
            self.get("/health")
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False
        return True

    def counters(self) -> dict[str, float]:
        text = self.get("/metrics")
        found = {}
        for name, spellings in COUNTERS.items():
            values = re.findall(rf"^(?:{'|'.join(spellings)})(?:\{{.*\}})? (\S+)$", text, re.MULTILINE)
            found[name] = sum(map(float, values))
        return found


@contextmanager
def started(server: Server, model: Path, mode: str, prompt: list[int]) -> Iterator[Running]:
    """The server, ready and once asked. Each server has its own default number of threads: OMP_NUM_THREADS is taken away."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "PYTHONPATH")} | server.environment
    with tempfile.NamedTemporaryFile("wb", suffix=".log", delete=False) as log:
        begin = time.perf_counter()
        process = subprocess.Popen(
            server.line(model, port, mode), env=environment, stdout=log, stderr=subprocess.STDOUT, cwd=tempfile.gettempdir()
        )
    running = Running(port, process, Path(log.name))
    try:
        while not running.healthy():
            if process.poll() is not None or time.perf_counter() - begin > START_LIMIT:
                raise SystemExit(f"{server.name} did not start: {running.log}\n" + running.log.read_text(errors="replace")[-3000:])
            time.sleep(0.1)
        running.health_seconds = time.perf_counter() - begin
        running.get("/v1/completions", {"model": "model", "prompt": prompt, "max_tokens": 1, "temperature": 0}, START_LIMIT)
        running.first_seconds = time.perf_counter() - begin
        yield running
    finally:
        stop(process)
    running.log.unlink()


def stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(timeout=STOP_LIMIT)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
