"""The engines that are compared: how each is started and asked, and which modes it has. running.py starts them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peers.checkpoints import Prompt, view

ROOT = Path(__file__).parents[2]
CONTEXT, POOL, SEATS, DRAFTS = 2048, 16384, 64, 3  # tokens of a request, tokens of all, requests at once, tokens drafted
MODES = ("plain", "mtp")
MTP = {"method": "mtp", "num_speculative_tokens": DRAFTS}
TCMALLOC = ("/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4", "/usr/lib64/libtcmalloc_minimal.so.4")
WORKER = Path(__file__).parent / "mistralrs_worker.py"
TRANSFORMERS_MTP = "transformers drafts with an MTP layer only in generate(), one request at a time; its server never does"


@dataclass(frozen=True, slots=True)
class Server:
    """One variant of an engine, with OpenAI's API; vLLM's command line as it is."""

    name: str  # engine and variant
    engine: str
    command: list[str]  # before the model
    options: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    undrafted: str | None = None  # why there are no drafts, where there are none
    temperature: float = 0.0

    def served(self, model: Path, folder: Path) -> Path:
        """The checkpoint as this engine reads it; what has to be made of it for that is in `folder`."""
        return model

    def line(self, model: Path, port: int, mode: str) -> list[str]:
        """What mtpserve and vLLM both understand has vLLM's names."""
        shared = ["--max-model-len", str(CONTEXT), "--max-num-seqs", str(SEATS), "--served-model-name", "model", "--host", "127.0.0.1"]
        drafts = self.drafting() if mode == "mtp" else self.plain()
        return [*self.command, str(model), "--port", str(port), *shared, *self.options, *drafts]

    def drafting(self) -> list[str]:
        return ["--speculative-config", json.dumps(MTP)]

    def plain(self) -> list[str]:
        return []

    def body(self, model: Path, prompt: Prompt, tokens: int) -> dict[str, Any]:
        """A request to /v1/completions: streamed, of exactly `tokens` tokens."""
        return {
            "model": "model", "prompt": prompt.ids, "max_tokens": tokens, "temperature": self.temperature, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip

    def described(self) -> dict[str, Any]:
        """What distinguishes it, without this machine's paths."""
        preloaded = [Path(path).name for path in self.environment.get("LD_PRELOAD", "").split(":") if path]
        bind = self.environment.get("VLLM_CPU_OMP_THREADS_BIND")
        found = {"name": self.name, "engine": self.engine, "options": self.options, "preloaded": preloaded, "bound_to": bind}
        return found | {"undrafted": self.undrafted, "temperature": self.temperature}


class Mtpserve(Server):
    def drafting(self) -> list[str]:
        """As users get it: three drafts at most, and how many of them pay is chosen while serving."""
        return ["--speculative-algorithm", "NEXTN", "--speculative-num-steps", str(DRAFTS)]

    def plain(self) -> list[str]:
        return ["--speculative-algorithm", "none"]


class Transformers(Server):
    """`transformers serve`. It asks the model's own name, takes text and knows no `ignore_eos`: its view has no end token."""

    def served(self, model: Path, folder: Path) -> Path:
        return view(model, folder)

    def line(self, model: Path, port: int, mode: str) -> list[str]:
        return [*self.command, str(model), "--port", str(port), "--host", "127.0.0.1", *self.options]

    def body(self, model: Path, prompt: Prompt, tokens: int) -> dict[str, Any]:
        return {"model": str(model), "prompt": prompt.text, "max_tokens": tokens, "temperature": 0, "stream": True}


class MistralRs(Server):
    """In a process that is no HTTP server: mistralrs_worker.py."""

    def served(self, model: Path, folder: Path) -> Path:
        return view(model, folder)

    def line(self, model: Path, port: int, mode: str) -> list[str]:
        return [*self.command, str(model), *self.options, *(self.drafting() if mode == "mtp" else [])]

    def drafting(self) -> list[str]:
        return ["--drafts", str(DRAFTS)]


def mtpserve(dtype: str, options: list[str]) -> Server:
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "kernels")))
    command = [sys.executable, "-m", "mtpserve", "launch"]
    return Mtpserve("mtpserve", "mtpserve", command, ["--dtype", dtype, "--max-total-tokens", str(POOL), *options], {"PYTHONPATH": paths})


def vllm(binary: Path, dtype: str, cached: bool, bind: str, cache: Path, more: list[str] | None = None) -> Server:
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
    name = f"vllm {dtype}, prefix cache" if cached else f"vllm {dtype}"
    return Server(name, "vllm", command, [*options, *(more or [])], environment)


def transformers(binary: Path, dtype: str) -> Server:
    """With as many keys and values as mtpserve has, and its tokens in a step: by default it takes most of the machine's memory."""
    block = 32
    sizes = ["--cb-block-size", str(block), "--cb-num-blocks", str(POOL // block), "--cb-max-batch-tokens", "512"]
    command = [str(binary.parent / "python"), "-m", "transformers.cli.transformers", "serve"]
    options = ["--continuous-batching", "--dtype", dtype, "--device", "cpu", *sizes]
    return Transformers(f"transformers {dtype}", "transformers", command, options, {"HF_HUB_OFFLINE": "1"}, TRANSFORMERS_MTP)


def mistralrs(binary: Path, dtype: str) -> Server:
    command = [str(binary.parent / "python"), str(WORKER)]
    options = ["--dtype", dtype, "--seats", str(SEATS)]
    return MistralRs(f"mistral.rs {dtype}", "mistral.rs", command, options, {"HF_HUB_OFFLINE": "1", "RUST_BACKTRACE": "0"})


PACKAGES = {
    "vllm": ("vllm", "torch", "transformers"),
    "transformers": ("transformers", "accelerate", "torch"),
    "mistral.rs": ("mistralrs",),
}


def versions(binary: Path, engine: str = "vllm") -> dict[str, str]:
    """Of an engine's packages in its venv. Its first one has to be there."""
    python, names = binary.parent / "python", PACKAGES[engine]
    if not python.exists():
        raise SystemExit(f"{engine}: {binary} is no program of a virtual environment, there is no {python}: see benchmarks/README.md")
    code = (
        f"import importlib.metadata as m, json; have = {{d.name for d in m.distributions()}}; "
        f"print(json.dumps({{n: m.version(n) for n in {names!r} if n in have}}))"
    )
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{engine}: {python} does not work: {done.stderr[-500:]}")
    found = dict(json.loads(done.stdout))
    if names[0] not in found:
        raise SystemExit(f"{engine}: the package {names[0]} is not installed for {python}: see benchmarks/README.md")
    return found
