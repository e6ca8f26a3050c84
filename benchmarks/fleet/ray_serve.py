"""mtpserve under Ray Serve: two replicas that lose an actor and an engine. In an environment with `pip install 'mtpserve[ray]'`:
`python benchmarks/fleet/ray_serve.py --json FILE`.

Each gets 40 streamed requests, completions and chats in turn:

steady                          nothing happens
actor killed                    a replica's process gets SIGKILL while it streams
engine killed                   an engine's process does: its replica ends, and Ray starts another one
engine killed, --engine-restarts 3
                                the replica starts its engine again and its streams go on

A stream whose replica is lost is cut: Ray resumes none. Fails where the first or the last loses a request, or a replica is not replaced.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import ray

sys.path.insert(0, str(Path(__file__).parents[1]))
from common.forty import REQUESTS, free_port, load, sending, summary, until
from common.record import save
from ray import serve

from mtpserve.integrations.ray import app

OPTIONS = {"model": "demo", "speculative_algorithm": "NEXTN", "max_total_tokens": "32768", "log_interval": "0"}
ENGINE, REPLICA = b"mtpserve.engine.process.process", b"ray::ServeReplica:default:mtpserve"


def engines() -> dict[int, int]:
    """Processes of engines → those of their replicas. Others that run on this machine are none of these."""
    found = {}
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdecimal() and ENGINE in (folder / "cmdline").read_bytes():
                state, parent = (folder / "stat").read_text().rsplit(")", 1)[1].split()[:2]
                if state != "Z" and (Path("/proc") / parent / "cmdline").read_bytes().startswith(REPLICA):
                    found[int(folder.name)] = int(parent)
        except OSError:  # it has just ended
            continue
    return found


def healthy(url: str) -> bool:
    """Both replicas are there: Serve's own word, not that of one of them."""
    application = serve.status().applications.get("default")
    deployments = [] if application is None else list(application.deployments.values())
    return bool(deployments) and all(str(each.status.value) == "HEALTHY" for each in deployments) and len(engines()) == 2


def run(restarts: int) -> None:
    serve.run(app(OPTIONS | {"engine_restarts": str(restarts), "deployment": {"num_replicas": 2}}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    args = parser.parse_args()
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    found: dict[str, Any] = {}
    ray.init(include_dashboard=False, log_to_driver=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        begun = time.monotonic()
        run(restarts=0)
        found["seconds to start"] = round(time.monotonic() - begun, 1)
        expected = [text for _, text in asyncio.run(load(url))]
        found["models"] = [model["id"] for model in httpx.get(url + "/v1/models").json()["data"]]
        found["steady"] = summary(asyncio.run(load(url)), expected)
        for what in ("actor killed", "engine killed"):
            engine, replica = next(iter(engines().items()))
            pid = replica if what == "actor killed" else engine
            found[what] = summary(asyncio.run(load(url, sending(lambda pid=pid: pid, signal.SIGKILL))), expected)
            found[what]["seconds until both are there"] = round(until(lambda: healthy(url), "another replica"), 1)
            print(what, json.dumps(found[what]), flush=True)
        run(restarts=3)
        until(lambda: healthy(url), "the new version")
        what, pid = "engine killed, --engine-restarts 3", next(iter(engines()))
        found[what] = summary(asyncio.run(load(url, sending(lambda: pid, signal.SIGKILL))), expected)
        print(json.dumps(found, indent=1))
    finally:
        serve.shutdown()
        ray.shutdown()
    save(args.json, {"ray": version("ray"), "requests": REQUESTS, "engines left": len(engines()), "trials": found})
    raise SystemExit(int(any(found[what]["ok"] < REQUESTS for what in ("steady", "engine killed, --engine-restarts 3"))))


if __name__ == "__main__":
    main()
