"""Routers in front of two servers, which lose an engine, are drained and come back: `python benchmarks/fleet/routers.py --bin VENV/bin`.

VENV has the routers: `pip install vllm-router sglang-router smg`. Those that it lacks are left out. Each is put in front of two
`mtpserve launch --model demo --chat-template mtpserve/demo/comments.jinja --engine-restarts 3 --drain-delay 3`, and gets 40 streamed
requests, completions and chats in turn:

steady         nothing happens
engine killed  the engine process of one server gets SIGKILL while it streams
drained        one server gets SIGTERM while it streams
back           the drained one is started again: how long until it gets requests, if it does within two minutes
server killed  one server's front end gets SIGKILL: a router cannot continue a stream that was cut

Texts of requests that ended well are compared with what one server alone says. Fails where one of
the first three loses a request. Also reported: what the router asks of a server, by path and status, and the names of models that it shows.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import httpx

sys.path.insert(0, str(Path(__file__).parents[1]))
from common.forty import REQUESTS, free_port, load, ok, sending, summary, until
from common.record import save

ROOT = Path(__file__).parents[2]
CHAT = str(ROOT / "mtpserve/demo/comments.jinja")
MUST = ("steady", "engine killed", "drained")
# The routers' defaults are once a minute, and three failures.
QUICK = "--health-check-interval-secs 1 --health-failure-threshold 1 --health-success-threshold 1"
ROUTERS = {
    "vllm-router": ("vllm-router", "--policy cache_aware --worker-startup-check-interval 1"),
    "vllm-router kv_aware": ("vllm-router", "--policy kv_aware --worker-startup-check-interval 1 --kv-event-model demo"),
    "sglang-router": ("sglang-router", "launch --policy cache_aware"),
    "smg": ("smg", "launch --policy cache_aware"),
}


@dataclass
class Server:
    """`mtpserve launch` on a port that it keeps when it is started again."""

    log: IO[str]
    options: list[str]
    port: int = field(default_factory=free_port)
    events: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        command = [
            sys.executable,
            "-m",
            "mtpserve",
            "launch",
            "--model",
            "demo",
            "--chat-template",
            CHAT,
            "--port",
            str(self.port),
            *self.options,
        ]
        command += [
            "--speculative-algorithm",
            "NEXTN",
            "--engine-restarts",
            "3",
            "--max-total-tokens",
            "32768",
            "--log-interval",
            "0",
            "--log-level",
            "debug",
        ]
        command += ["--kv-events-config", json.dumps({"endpoint": f"tcp://127.0.0.1:{self.events}"})]
        paths = os.pathsep.join(map(str, (ROOT, ROOT / "kernels")))
        self.process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": paths}, cwd=ROOT, stdout=self.log, stderr=self.log)
        until(lambda: ok(self.url + "/health"), "a server")

    @property
    def running(self) -> subprocess.Popen[bytes]:
        assert self.process is not None
        return self.process

    def engine(self) -> int:
        return int(Path(f"/proc/{self.running.pid}/task/{self.running.pid}/children").read_text().split()[0])

    def tokens(self) -> int:
        return int(httpx.get(self.url + "/stats").json()["stats"]["generation_tokens_total"])


@contextmanager
def router(binary: Path, options: str, servers: list[Server], log: IO[str]) -> Iterator[tuple[str, list[str]]]:
    """→ its address and its command."""
    port = free_port()
    command = [str(binary), *options.split(), "--port", str(port), "--prometheus-port", str(free_port())]
    command += ["--worker-urls", *(server.url for server in servers)]
    if "kv_aware" in options:
        for server in servers:
            command += ["--kv-event-source", f"{server.url}=tcp://127.0.0.1:{server.events}"]
    with subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            until(lambda: ok(url + "/v1/models") and strangers(url), binary.name)
            yield url, command
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # the Python of its launcher does not pass signals on


def strangers(url: str) -> bool:
    """Requests whose beginnings nobody has seen, all at once: they go where there is least to do. → whether all were answered."""

    async def ask() -> bool:
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:
            bodies = [{"model": "demo", "prompt": f"{time.monotonic()} {number}", "max_tokens": 32} for number in range(8)]
            answers = await asyncio.gather(*(http.post("/v1/completions", json=body) for body in bodies))
            return all(answer.status_code == 200 for answer in answers)

    return asyncio.run(ask())


def taken_back(url: str, server: Server, most: float = 120) -> float | None:
    """How long until it gets requests, known ones, for which it was preferred, or new ones; None: it got none for so long."""
    began = time.monotonic()
    while time.monotonic() - began < most:
        if strangers(url) and asyncio.run(load(url)) and server.tokens() > 0:
            return round(time.monotonic() - began, 1)
    return None


def polled(log: IO[str]) -> dict[str, int]:
    """What was asked of the servers, but for generation: method, path and status → how often."""
    log.seek(0)
    lines = re.findall(r"127\.0\.0\.1 (GET|POST) (\S+) (\d+) [\d.]+ s ", log.read())
    found = Counter(f"{method} {path} {status}" for method, path, status in lines if not path.startswith(("/v1/completions", "/v1/chat")))
    return dict(sorted(found.items()))


async def texts(server: Server) -> list[str]:
    return [text for _, text in await load(server.url)]


def trial(binary: Path, options: str, server_options: list[str], folder: Path) -> dict[str, Any]:
    with ExitStack() as stack:
        logs = [stack.enter_context(open(folder / f"{name}.log", "w+")) for name in ("one", "two", "router")]
        servers = [Server(log, server_options) for log in logs[:2]]
        for server in servers:
            server.start()
            stack.callback(lambda server=server: server.running.kill())
        first = servers[0]
        expected = asyncio.run(texts(first))
        for log in logs[:2]:
            log.truncate(0)
        url, command = stack.enter_context(router(binary, options, servers, logs[2]))
        found: dict[str, Any] = {"command": " ".join([binary.name, *command[1:]])}
        found["models"] = [model["id"] for model in httpx.get(url + "/v1/models").json()["data"]]
        found["steady"] = summary(asyncio.run(load(url)), expected)
        found["tokens of each"] = [server.tokens() for server in servers]
        found["engine killed"] = summary(asyncio.run(load(url, sending(first.engine, signal.SIGKILL))), expected)
        until(lambda: ok(first.url + "/health"), "the killed engine")
        found["drained"] = summary(asyncio.run(load(url, sending(lambda: first.running.pid, signal.SIGTERM))), expected)
        found["drained exit code"] = first.running.wait(60)
        found["asked"] = polled(logs[0])
        first.start()
        found["back after, in s"] = taken_back(url, first)
        found["server killed"] = summary(asyncio.run(load(url, sending(lambda: first.running.pid, signal.SIGKILL))), expected)
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", type=Path, required=True, help="the folder of the routers' programs")
    parser.add_argument("--routers", nargs="+", choices=list(ROUTERS), default=list(ROUTERS))
    parser.add_argument("--options", default=QUICK, help="further options for each router (default: health is asked every second)")
    parser.add_argument("--server-options", default="--drain-delay 3", help="further options for the servers")
    parser.add_argument("--logs", type=Path, help="keep the logs here")
    parser.add_argument("--json")
    args = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory() as made:
        for name in args.routers:
            program, options = ROUTERS[name]
            if not (args.bin / program).exists():
                print(f"{name}: not installed")
                continue
            folder = (args.logs or Path(made)) / name.replace(" ", "-")
            folder.mkdir(parents=True, exist_ok=True)
            found[name] = trial(args.bin / program, f"{options} {args.options}", args.server_options.split(), folder)
            print(name, json.dumps(found[name]), flush=True)
    code = "from importlib.metadata import distributions; print({d.name: d.version for d in distributions()})"
    listed = subprocess.run([str(args.bin / "python"), "-c", code], check=True, capture_output=True, text=True).stdout
    versions = dict(re.findall(r"'(vllm-router|sglang-router|smg)': '([^']+)'", listed))
    save(args.json, {"routers": versions, "requests": REQUESTS, "trials": found})
    lost = [f"{name}, {what}: {each[what]['ended']}" for name, each in found.items() for what in MUST if each[what]["ok"] < REQUESTS]
    print(*lost, sep="\n")
    raise SystemExit(int(bool(lost)))


if __name__ == "__main__":
    main()
