"""A soak test of weights that change: `python benchmarks/soak_weights.py --seconds 1200 --json FILE`.

A tiny random model with an MTP layer, in several versions of its weights, and two LoRA adapters, behind two engines. 16 clients ask.
Meanwhile the operator updates the weights, pauses and continues, puts the engines to sleep and wakes them up, loads and unloads adapters,
and kills an engine. An answer names the version of its weights. Its text must be what a fresh server of that version writes. Checked: no
wrong text, no lost request, no page in use at the end, constant memory. Exit code 1 if a check fails.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch
from common.record import save
from safetensors.torch import save_file
from soak import ROOT, resident
from soak_cache import Server, running, settled

sys.path.insert(0, str(ROOT))
from tests.models.checkpoints import mimo

TOKENS, RANK, ADAPTERS = 24, 8, ("red", "blue")
SIZES = {"vocab_size": 2048, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 2048}
ACTS = {"update": 6, "paused_update": 4, "change_adapters": 4, "nap": 2, "kill": 1}  # what the operator does, and how often
Text = tuple[int, ...]


def checkpoints(folder: Path, count: int) -> dict[str, Path]:
    """By weight version."""
    for number in range(count):
        mimo(folder / f"v{number}", seed=number, **SIZES)
    return {f"v{number}": folder / f"v{number}" for number in range(count)}


def adapter(folder: Path, seed: int) -> Path:
    """A PEFT directory whose product is about as large as the weights."""
    generator, hidden, kv = torch.Generator().manual_seed(seed), SIZES["hidden_size"], SIZES["num_key_value_heads"] * SIZES["head_dim"]
    tensors = {}
    for layer in range(SIZES["num_hidden_layers"]):
        for name, outputs in (("q_proj", hidden), ("v_proj", kv), ("o_proj", hidden)):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(RANK, hidden, generator=generator) * hidden**-0.5
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(outputs, RANK, generator=generator) * RANK**-0.5
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["q_proj", "v_proj", "o_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def options(model: Path) -> list[str]:
    named = ["--model", str(model), "--served-model-name", "base", "--tokenizer", str(ROOT / "mtpserve" / "demo"), "--dtype", "float32"]
    return [*named, "--speculative-algorithm", "MTP+NGRAM", "--max-total-tokens", "16384", "--enable-lora", "--max-loras", "2"]


async def ask(client: httpx.AsyncClient, prompt: list[int], model: str) -> httpx.Response:
    """`model`: "base", or an adapter's name."""
    body: dict[str, Any] = {"input_ids": prompt, "sampling_params": {"max_new_tokens": TOKENS, "temperature": 0, "ignore_eos": True}}
    return await client.post("/generate", json=body | ({} if model == "base" else {"lora_path": model}))


async def references(models: dict[str, Path], adapters: dict[str, Path], prompts: list[list[int]]) -> dict[tuple[str, str, int], Text]:
    """By weight version, model and number of the prompt: the text of a fresh server of that version."""
    texts: dict[tuple[str, str, int], Text] = {}
    for version, path in models.items():
        modules = [f"{name}={folder}" for name, folder in adapters.items()]
        with running("--lora-modules", *modules, "--disable-radix-cache", model=options(path)) as server:
            async with httpx.AsyncClient(base_url=server.url, timeout=300) as client:
                for model in ("base", *adapters):
                    answers = await asyncio.gather(*(ask(client, prompt, model) for prompt in prompts))
                    for number, answer in enumerate(answers):
                        texts[version, model, number] = tuple(answer.raise_for_status().json()["output_ids"])
    return texts


@dataclass
class Soak:
    server: Server
    client: httpx.AsyncClient
    models: dict[str, Path]
    adapters: dict[str, Path]
    prompts: list[list[int]]
    texts: dict[tuple[str, str, int], Text]
    dice: random.Random = field(default_factory=lambda: random.Random(5))
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    loaded: set[str] = field(default_factory=set)
    memory: list[tuple[int, ...]] = field(default_factory=list)

    async def customer(self, number: int, until: float) -> None:
        dice = random.Random(number)
        while time.perf_counter() < until:
            model = dice.choice(["base", "base", *self.adapters])
            prompt = dice.randrange(len(self.prompts))
            try:
                answer = await ask(self.client, self.prompts[prompt], model)
            except httpx.HTTPError as error:
                self.wrong.append(f"a request was lost: {type(error).__name__} {error}")
                continue
            self.check(answer, model, prompt)

    def check(self, answer: httpx.Response, model: str, prompt: int) -> None:
        if answer.status_code == 400 and "must be the name of an adapter" in answer.text:
            self.counts["refused, as the adapter is not loaded"] += 1
            return
        if answer.status_code != 200:
            self.wrong.append(f"{model}: {answer.status_code} {answer.text[:300]}")
            return
        body = answer.json()
        text, meta = tuple(body["output_ids"]), body["meta_info"]
        if meta["finish_reason"]["type"] == "abort":
            self.counts["aborted"] += 1
            return
        kind = "base" if model == "base" else "adapters"
        first, *others = meta["weight_versions"]
        right = self.texts[first["version"], model, prompt]
        if text[: first["end"]] != right[: first["end"]]:
            self.wrong.append(f"{model} {meta['weight_versions']} prompt {prompt}: {text} instead of {right}")
        elif others:
            self.counts["answers of several versions, the first part compared"] += 1
        else:
            self.counts[f"answers of {kind}"] += 1

    async def call(self, path: str, **body: Any) -> dict[str, Any]:
        answer = await self.client.post(path, json=body)
        if answer.status_code != 200:
            self.wrong.append(f"{path} {body}: {answer.status_code} {answer.text[:300]}")
        return answer.json() if answer.headers.get("content-type", "").startswith("application/json") else {}

    async def update(self) -> None:
        version = self.dice.choice(list(self.models))
        await self.call("/update_weights_from_disk", model_path=str(self.models[version]), weight_version=version)

    async def paused_update(self) -> None:
        await self.call("/pause_generation", mode=self.dice.choice(["abort", "retract", "in_place"]))
        await self.update()
        await self.call("/continue_generation")

    async def nap(self) -> None:
        await self.call("/pause_generation", mode=self.dice.choice(["abort", "retract"]))
        await self.call(f"/sleep?level=1&mode={self.dice.choice(['keep', 'abort'])}")
        await asyncio.sleep(self.dice.random())
        await self.call("/wake_up")
        await self.call("/continue_generation")

    async def change_adapters(self) -> None:
        name = self.dice.choice(list(self.adapters))
        if name in self.loaded:
            self.loaded.discard(name)
            await self.call("/v1/unload_lora_adapter", lora_name=name)
        else:
            await self.call("/v1/load_lora_adapter", lora_name=name, lora_path=str(self.adapters[name]))
            self.loaded.add(name)

    async def kill(self) -> None:
        """One engine; nothing else until it is back."""
        children = Path(f"/proc/{self.server.process.pid}/task/{self.server.process.pid}/children").read_text().split()
        os.kill(int(self.dice.choice(children)), signal.SIGKILL)
        for _ in range(600):
            await asyncio.sleep(0.5)  # also until the server has noticed it
            answer = await self.client.get("/health?verbose=true")
            if answer.status_code == 200 and answer.json()["status"] == "ok":
                return
        self.wrong.append(f"an engine did not come back: {answer.text}")

    async def operate(self, acts: list[str], until: float) -> None:
        while time.perf_counter() < until:
            act = self.dice.choices(acts, [ACTS[name] for name in acts])[0]
            await getattr(self, act)()
            self.counts[act] += 1
            await asyncio.sleep(self.dice.random() * 2)

    async def watch(self) -> None:
        while True:
            with contextlib.suppress(OSError):
                self.memory.append(resident([self.server.process.pid]))
            await asyncio.sleep(1)

    async def run(self, seconds: float, clients: int, acts: list[str]) -> None:
        until = time.perf_counter() + seconds
        watching = asyncio.create_task(self.watch())
        await asyncio.gather(self.operate(acts, until), *(self.customer(number, until) for number in range(clients)))
        watching.cancel()
        self.wrong += await settled(self.client, self.counts)
        third = len(self.memory) // 3
        before, after = self.memory[third][0], self.memory[-1][0]
        if third > 60 and after > 1.1 * before:
            self.wrong.append(f"the front end's memory grew from {before >> 20} to {after >> 20} MiB")


async def soak(args: argparse.Namespace, folder: Path) -> Soak:
    models, dice = checkpoints(folder, args.versions), random.Random(1)
    adapters = {name: adapter(folder / name, seed) for seed, name in enumerate(ADAPTERS)}
    heads = [[dice.randrange(10, 2000) for _ in range(dice.randint(20, 200))] for _ in range(8)]
    prompts = [dice.choice(heads) + [dice.randrange(10, 2000) for _ in range(dice.randint(1, 20))] for _ in range(args.prompts)]
    texts = await references(models, adapters, prompts)
    first = next(iter(models))
    with running("--data-parallel-size", "2", model=options(models[first])) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=300) as client:
            test = Soak(server, client, models, adapters, prompts, texts)
            await test.call("/update_weights_from_disk", model_path=str(models[first]), weight_version=first)
            await test.run(args.seconds, args.clients, args.acts)
        if test.wrong:
            server.log.seek(0)
            print(server.log.read()[-8000:])
    return test


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1200)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--versions", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--acts", nargs="+", choices=list(ACTS), default=list(ACTS), help="what the operator does")
    parser.add_argument("--json")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        test = asyncio.run(soak(args, Path(folder)))
    for name, count in sorted(test.counts.items()):
        print(f"{count:9} {name}")
    for line in test.wrong[:20]:
        print("WRONG", line)
    save(args.json, {"seconds": args.seconds, "clients": args.clients, "counts": dict(test.counts), "wrong": test.wrong[:20]})
    raise SystemExit(int(bool(test.wrong)))


if __name__ == "__main__":
    main()
