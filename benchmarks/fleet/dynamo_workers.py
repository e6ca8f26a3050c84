"""mtpserve as two workers of Dynamo, of which one is killed: `python benchmarks/fleet/dynamo_workers.py --python VENV/bin/python`.

VENV has mtpserve with the extra `dynamo`, see docs/deploy.md. Neither etcd nor NATS is needed: discovery is by files. The frontend gets 40
streamed requests, completions and chats in turn, with --migration-limit 3:

steady          nothing happens
engine killed   the engine process of one worker gets SIGKILL while it streams: the worker ends, and its streams go on in the other one
worker killed   a worker itself does

Fails where one of them loses a request. Texts are compared with those of the first run, which nothing disturbs: they are greedy.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parents[1]))
from common.forty import REQUESTS, free_port, load, ok, sending, summary, until
from common.record import save

ROOT = Path(__file__).parents[2]
LOCAL = dict.fromkeys(("DYN_TCP_RPC_HOST", "DYN_TCP_RESPONSE_STREAM_HOST", "DYN_EVENT_PLANE_HOST"), "127.0.0.1")
PLANES = ["--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq"]
OPTIONS = ["--model", "demo", "--speculative-algorithm", "NEXTN", "--max-total-tokens", "32768", "--log-interval", "0"]


class Fleet:
    """A frontend and workers. Ends them with the stack."""

    def __init__(self, python: str, folder: Path, stack: ExitStack, router: Sequence[str]) -> None:
        shutil.rmtree(folder / "kv", ignore_errors=True)  # workers that were killed are still in it
        self.python, self.folder, self.stack = python, folder, stack
        self.port = free_port()
        self.commands: list[str] = []
        self.front = self.start("frontend", ["-m", "dynamo.frontend", "--http-port", str(self.port), "--migration-limit", "3", *router])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, name: str, module: Sequence[str]) -> subprocess.Popen[bytes]:
        paths = os.pathsep.join(map(str, (ROOT, ROOT / "kernels")))
        environment = os.environ | LOCAL | {"DYN_FILE_KV": str(self.folder / "kv"), "DYN_LOG": "warn", "PYTHONPATH": paths}
        command = [*module, *PLANES]
        self.commands.append(" ".join(["python", *command]))
        log = self.stack.enter_context((self.folder / f"{name}.log").open("wb"))
        process = subprocess.Popen([self.python, *command], env=environment, cwd=self.folder, stdout=log, stderr=log)
        self.stack.callback(process.kill)
        return process

    def worker(self, number: int) -> subprocess.Popen[bytes]:
        """Known to the frontend when this returns."""
        until(lambda: ok(self.url + "/health"), "the frontend")
        known = self.instances()  # one that was killed may be among them for a while
        process = self.start(f"worker-{number}", ["-m", "mtpserve.integrations.dynamo", *OPTIONS])
        until(lambda: bool(self.instances() - known), f"worker {number}")
        return process

    def instances(self) -> set[int]:
        """Ids of the workers that the frontend knows."""
        known = httpx.get(self.url + "/health").json()
        return {each["instance_id"] for each in known.get("instances", []) if each.get("endpoint") == "generate"}


def answers(url: str) -> bool:
    body = {"model": "demo", "prompt": "a", "max_tokens": 1}
    return httpx.post(url + "/v1/completions", json=body, timeout=30).status_code == 200


def engine_of(worker: subprocess.Popen[bytes]) -> int:
    children = Path(f"/proc/{worker.pid}/task").glob("*/children")
    pids = [int(pid) for file in children for pid in file.read_text().split()]
    (engine,) = [pid for pid in pids if b"mtpserve.engine.process.process" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return engine


def trial(python: str, folder: Path, router: Sequence[str]) -> dict[str, Any]:
    with ExitStack() as stack:
        fleet = Fleet(python, folder, stack, router)
        workers = [fleet.worker(1), fleet.worker(2)]
        until(lambda: answers(fleet.url), "the model")
        found: dict[str, Any] = {"commands": list(fleet.commands)}
        found["models"] = [model["id"] for model in httpx.get(fleet.url + "/v1/models").json()["data"]]
        expected = [text for _, text in asyncio.run(load(fleet.url))]
        found["steady"] = summary(asyncio.run(load(fleet.url)), expected)
        found["engine killed"] = summary(asyncio.run(load(fleet.url, sending(lambda: engine_of(workers[0]), signal.SIGKILL))), expected)
        found["the worker's exit code"] = workers[0].wait(30)
        workers.append(fleet.worker(3))
        found["worker killed"] = summary(asyncio.run(load(fleet.url, sending(lambda: workers[1].pid, signal.SIGKILL))), expected)
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="that of the environment with Dynamo")
    parser.add_argument("--router-mode", default="round-robin", help="the frontend's: round-robin or kv")
    parser.add_argument("--logs", type=Path)
    parser.add_argument("--json")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = args.logs or Path(made)
        folder.mkdir(parents=True, exist_ok=True)
        found = trial(args.python, folder, ["--router-mode", args.router_mode])
    print(json.dumps(found, indent=1))
    listed = subprocess.run([args.python, "-m", "pip", "list"], check=True, capture_output=True, text=True).stdout
    versions = dict(re.findall(r"(ai-dynamo\S*)\s+(\S+)", listed))
    save(args.json, {"dynamo": versions, "requests": REQUESTS, "trials": found})
    raise SystemExit(int(any(found[what]["ok"] < REQUESTS for what in ("steady", "engine killed", "worker killed"))))


if __name__ == "__main__":
    main()
