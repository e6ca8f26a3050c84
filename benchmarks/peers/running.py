"""An engine from its start to its end: waiting until it is ready, loads, its counters of drafts, and errors with what it said."""

from __future__ import annotations

import contextlib
import json
import os
import re
import selectors
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peers.checkpoints import Prompt
from peers.servers import MistralRs, Server

START_LIMIT, STOP_LIMIT = 900, 60  # seconds
BUSY = 0.1  # share of the cores from which it is said that others take them
SHOWN = 3000  # characters of a log's end
CLIENT = Path(__file__).parent / "client.py"
# Counters since the server's start: verifications with drafts, accepted drafts.
COUNTERS = {
    "drafts": ("mtpserve_spec_drafts_total", "vllm:spec_decode_num_drafts_total"),
    "accepted": ("mtpserve_spec_accepted_tokens_total", "vllm:spec_decode_num_accepted_tokens_total"),
}


class EngineFailed(SystemExit):
    """Where nobody handles it: the whole text. `said`: in one line what it did and why, in the engine's words."""

    def __init__(self, server: Server, said: str, log: Path) -> None:
        tail = log.read_text(errors="replace")[-SHOWN:]
        super().__init__(f"{server.name} {said}\n{tail}\n(the whole log: {log})")
        self.said = said.splitlines()[0][:400]


class DidNotStart(EngineFailed):
    def __init__(self, server: Server, said: str, log: Path) -> None:
        super().__init__(server, f"did not start: {said}", log)


@dataclass(slots=True)
class Running:
    """`model`: as the engine reads it."""

    server: Server
    model: Path
    port: int
    process: subprocess.Popen[Any]
    log: Path
    health_seconds: float = 0.0  # from the start until it is ready
    first_seconds: float = 0.0  # until the first completion has returned

    def get(self, path: str, body: dict[str, Any] | None = None, timeout: float = 10) -> str:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return str(answer.read().decode())

    def ready(self) -> bool:
        """Looks once. Raises what the engine says where it cannot start."""
        try:
            self.get("/health")
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False
        return True

    def first(self, prompt: Prompt) -> None:
        """One token, whatever it takes."""
        try:
            answer = self.get("/v1/completions", self.server.body(self.model, prompt, 1), START_LIMIT)
        except urllib.error.HTTPError as error:
            raise DidNotStart(self.server, f"its first answer was {error.code}: {error.read()[:300].decode()}", self.log) from None
        except OSError as error:
            raise DidNotStart(self.server, f"its first answer failed: {error}", self.log) from None
        if '"error"' in answer:
            raise DidNotStart(self.server, f"its first answer was {answer[:300]}", self.log)

    def load(self, prompts: list[Prompt], tokens: int, concurrency: int) -> dict[str, Any]:
        """client.py's answer: what became of each request, and the client's CPU time. Requests with another length are an error."""
        bodies = [self.server.body(self.model, prompt, tokens) for prompt in prompts]
        job = {"host": "127.0.0.1", "port": self.port, "bodies": bodies, "concurrency": concurrency}
        done = subprocess.run([sys.executable, str(CLIENT)], input=json.dumps(job), capture_output=True, text=True, check=False)
        if done.returncode:
            self.fail(f"the client failed: {done.stderr[-2000:]}")
        return self.checked(dict(json.loads(done.stdout)), prompts, tokens)

    def checked(self, answer: dict[str, Any], prompts: list[Prompt], tokens: int) -> dict[str, Any]:
        for request, prompt in zip(answer["requests"], prompts, strict=True):
            if request["tokens"] != tokens:
                self.fail(f"a request got {request['tokens']} tokens, not {tokens}")
            if request["prompt_tokens"] != len(prompt.ids):
                self.fail(f"a prompt was {request['prompt_tokens']} tokens to it, not {len(prompt.ids)}")
        return answer

    def fail(self, what: str) -> None:
        raise EngineFailed(self.server, f"failed: {what}", self.log)

    def counters(self) -> dict[str, float]:
        """Nothing where the engine does not draft."""
        if self.server.undrafted is not None:
            return dict.fromkeys(COUNTERS, 0.0)
        text = self.get("/metrics")
        found = {}
        for name, spellings in COUNTERS.items():
            values = re.findall(rf"^(?:{'|'.join(spellings)})(?:\{{.*\}})? (\S+)$", text, re.MULTILINE)
            found[name] = sum(map(float, values))
        return found


class Worker(Running):
    """The same of mistralrs_worker.py, by its stdin and stdout: no client takes time of its own."""

    def ready(self) -> bool:
        return (answer := self.line(0.1)) is not None and self.understood(answer)

    def understood(self, answer: dict[str, Any]) -> bool:
        if "error" in answer:
            raise DidNotStart(self.server, answer["error"], self.log)
        return True

    def first(self, prompt: Prompt) -> None:
        self.understood(self.asked([prompt], 1, 1))

    def load(self, prompts: list[Prompt], tokens: int, concurrency: int) -> dict[str, Any]:
        answer = self.asked(prompts, tokens, concurrency)
        if "error" in answer:
            self.fail(answer["error"])
        return self.checked(answer | {"cpu_seconds": None}, prompts, tokens)

    def asked(self, prompts: list[Prompt], tokens: int, concurrency: int) -> dict[str, Any]:
        assert self.process.stdin is not None
        job = {"prompts": [prompt.text for prompt in prompts], "tokens": tokens, "concurrency": concurrency}
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(job).encode() + b"\n")
            self.process.stdin.flush()
        answer = self.line(START_LIMIT)
        if answer is None:
            self.fail(f"gave no answer within {START_LIMIT} s")
        assert answer is not None
        return answer

    def counters(self) -> dict[str, float]:
        """It has none."""
        return dict.fromkeys(COUNTERS, 0.0)

    def line(self, seconds: float) -> dict[str, Any] | None:
        """None if none came in this time."""
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            if not selector.select(seconds):
                return None
        line = self.process.stdout.readline()
        return dict(json.loads(line)) if line else {"error": f"it ended: {last_words(self.log)}"}


def last_words(log: Path) -> str:
    """The last line that names an error, or the last one."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"(Error|Exception|ERROR|error):? ", line)]
    return next(reversed(errors or lines), "it said nothing")[:300]


@contextmanager
def started(server: Server, model: Path, mode: str, prompt: Prompt, folder: Path | None = None) -> Iterator[Running]:
    """The engine, ready and once asked. Each has its own default number of threads: OMP_NUM_THREADS is taken away. `folder`: for what has
    to be made of the checkpoint."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    own = server.environment
    environment = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "PYTHONPATH")} | own
    served = server.served(model, folder or Path(tempfile.gettempdir()) / "mtpserve-views")
    worker = isinstance(server, MistralRs)
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE} if worker else {}
    with tempfile.NamedTemporaryFile("wb", suffix=".log", delete=False) as log:
        begin = time.perf_counter()
        where: dict[str, Any] = {"env": environment, "cwd": tempfile.gettempdir()}
        streams = {"stdout": log, "stderr": log} | pipes
        process = subprocess.Popen(server.line(served, port, mode), **where, **streams)
    running = (Worker if worker else Running)(server, served, port, process, Path(log.name))
    try:
        while not (ended := process.poll() is not None, running.ready())[1]:
            if ended:  # before that look: what it said last has been read
                raise DidNotStart(server, last_words(running.log), running.log)
            if time.perf_counter() - begin > START_LIMIT:
                raise DidNotStart(server, f"it was not ready after {START_LIMIT} s", running.log)
            time.sleep(0.1)
        running.health_seconds = time.perf_counter() - begin
        running.first(prompt)
        running.first_seconds = time.perf_counter() - begin
        yield running
    finally:
        stop(process)
    running.log.unlink()


def busy(seconds: float = 1.0) -> float:
    """Share of the cores that somebody takes now, where Linux says so."""

    def ticks() -> tuple[int, int]:
        counted = list(map(int, Path("/proc/stat").read_text().splitlines()[0].split()[1:9]))
        return sum(counted), counted[3] + counted[4]  # idle, waiting for a disk

    if not Path("/proc/stat").exists():
        return 0.0
    (all_before, idle_before), _, (all_after, idle_after) = ticks(), time.sleep(seconds), ticks()
    return 1 - (idle_after - idle_before) / max(1, all_after - all_before)


def stop(process: subprocess.Popen[Any]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(timeout=STOP_LIMIT)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
