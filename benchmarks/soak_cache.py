"""A soak test of the prefix cache and its tiers: `python benchmarks/soak_cache.py --seconds 600 --kills 5 --json FILE`.

The demo model with a device pool that holds a few prompts, some host memory and a folder; prompts that share their beginnings, several
salts, clients that leave. Each whole answer is compared with that of a server without a cache. From time to time the server is killed
(SIGKILL, with its engine) while it writes, some files are damaged, and it is started again on the same folder. Checked: no wrong text,
no page lost, constant memory within a life. Exit code 1 if a check fails.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
from common.record import save
from soak import ROOT, ready, resident

TOKENS = 12


DEMO = ("--model", "demo", "--speculative-algorithm", "NEXTN")


class Server:
    def __init__(self, *options: str, model: Sequence[str] = DEMO) -> None:
        """`model`: the options that name it and its drafts."""
        paths = os.pathsep.join(map(str, (ROOT, ROOT / "kernels")))
        command = [sys.executable, "-m", "mtpserve", "launch", *model, "--port", "0", "--log-interval", "0", *options]
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            command, env=os.environ | {"PYTHONPATH": paths}, cwd=ROOT, stdout=self.log, stderr=subprocess.STDOUT
        )
        self.url = ready(self.process, self.log)
        self.engines = [int(pid) for pid in Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()]

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(timeout=60)

    def kill(self) -> None:
        for pid in (*self.engines, self.process.pid):
            os.kill(pid, signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def running(*options: str, model: Sequence[str] = DEMO) -> Iterator[Server]:
    server = Server(*options, model=model)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.stop()


def make_prompts(count: int) -> list[list[int]]:
    dice = random.Random(1)
    heads = [[dice.randrange(10, 2000) for _ in range(dice.randint(100, 700))] for _ in range(8)]
    return [
        dice.choice(heads)[: dice.randint(60, 700)] + [dice.randrange(10, 2000) for _ in range(dice.randint(1, 60))] for _ in range(count)
    ]


async def ask(client: httpx.AsyncClient, prompt: list[int], salt: str = "", leave: bool = False) -> tuple[list[int], int]:
    """→ the answer's tokens, prompt tokens that were found."""
    body: dict[str, Any] = {
        "model": "demo", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip
    if salt:
        body["cache_salt"] = salt
    if leave:
        with contextlib.suppress(httpx.TimeoutException):
            await client.post("/v1/completions", json=body, timeout=random.random() * 0.2)
        return [], 0
    answer = (await client.post("/v1/completions", json=body)).raise_for_status().json()
    return answer["choices"][0]["token_ids"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


async def references(prompts: list[list[int]]) -> list[list[int]]:
    with running("--disable-radix-cache") as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=300) as client:
            gate = asyncio.Semaphore(16)

            async def one(prompt: list[int]) -> list[int]:
                async with gate:
                    return (await ask(client, prompt))[0]

            return list(await asyncio.gather(*(one(prompt) for prompt in prompts)))


async def life(
    server: Server, prompts: list[list[int]], right: list[list[int]], seconds: float, seen: Counter[str], dies: bool
) -> list[str]:
    wrong, until, memory = list[str](), time.perf_counter() + seconds, list[tuple[int, ...]]()
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:

        async def worker(number: int) -> None:
            dice = random.Random(f"{number} {until}")
            while time.perf_counter() < until:
                which, leave = dice.randrange(len(prompts)), dice.random() < 0.1
                try:
                    tokens, cached = await ask(client, prompts[which], dice.choice(["", "", "a", "b"]), leave)
                except httpx.TransportError:
                    return  # it was killed
                seen["prompt tokens"] += 0 if leave else len(prompts[which])
                seen["cached tokens"] += cached
                seen["left" if leave else "answers"] += 1
                if not leave and tokens != right[which]:
                    wrong.append(f"prompt {which}: {tokens} instead of {right[which]}, {cached} cached")

        async def watch() -> None:
            while True:
                await asyncio.sleep(1)
                with contextlib.suppress(OSError):
                    memory.append(resident([server.process.pid, *server.engines]))

        watching = asyncio.create_task(watch())
        workers = [asyncio.create_task(worker(number)) for number in range(16)]
        if dies:
            await asyncio.sleep(seconds * 0.8)
            server.kill()
        await asyncio.gather(*workers)
        watching.cancel()
        if not dies:
            wrong += await settled(client, seen)
            third = len(memory) // 3
            for before, after in zip(memory[third], memory[-1], strict=True) if third > 20 else ():
                seen[f"MiB after {third} s and at the end: {before >> 20} {after >> 20}"] += 1
                if after > 1.1 * before:
                    wrong.append(f"memory grew from {before >> 20} to {after >> 20} MiB")
    return wrong


async def settled(client: httpx.AsyncClient, seen: Counter[str]) -> list[str]:
    """Idle: no page is held."""
    for _ in range(50):
        text = re.sub(r'\{model_name="[^"]*"\}|,?model_name="[^"]*",?', "", (await client.get("/metrics")).text)
        lines = text.splitlines()
        metrics = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line.startswith("mtpserve_")}
        if metrics["mtpserve_kv_pages_used"] == metrics["mtpserve_requests_running"] == 0:
            for name in metrics:
                if name.startswith(("mtpserve_kv_loaded_pages_total", "mtpserve_kv_failed", "mtpserve_preemptions_total")):
                    seen[name.removeprefix("mtpserve_")] += int(metrics[name])
            return []
        await asyncio.sleep(0.2)
    return [f"{metrics['mtpserve_kv_pages_used']:.0f} pages are still in use"]


def damage(folder: Path, dice: random.Random) -> int:
    """A flipped bit in some files, half of some others."""
    files = sorted(folder.rglob("*.kv"))
    for file in (some := dice.sample(files, len(files) // 20)):
        content = bytearray(file.read_bytes())
        content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
        file.write_bytes(content if dice.random() < 0.5 else content[: len(content) // 2])
    return len(some)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600, help="of the last life; those that are killed last a tenth each")
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=500)
    parser.add_argument("--json")
    given = parser.parse_args()
    prompts, seen, wrong, dice = make_prompts(given.prompts), Counter[str](), list[str](), random.Random(2)
    right = asyncio.run(references(prompts))
    with tempfile.TemporaryDirectory() as folder:
        options = ["--max-total-tokens", "8192", "--kv-offload-dir", folder, "--kv-offload-dir-gib", "1"]
        for number in range(given.kills + 1):
            last = number == given.kills
            with running(*options) as server:
                wrong += asyncio.run(life(server, prompts, right, given.seconds if last else given.seconds / 10, seen, dies=not last))
            seen["files damaged"] += 0 if last else damage(Path(folder), dice)
        total = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
        if total > 1.1 * 2**30:
            wrong.append(f"the folder holds {total} bytes")
    for name, count in sorted(seen.items()):
        print(f"{count:9} {name}")
    for line in wrong[:20]:
        print("WRONG", line)
    save(given.json, {"seconds": given.seconds, "kills": given.kills, "prompts": given.prompts, "seen": dict(seen), "wrong": wrong[:20]})
    raise SystemExit(int(bool(wrong)))


if __name__ == "__main__":
    main()
