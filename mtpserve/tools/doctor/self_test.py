"""The kernels of a device against their references, and the bundled model with and without speculation."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from time import perf_counter

import torch
from mtpserve_kernels.cpu.library import Unavailable, library
from mtpserve_kernels.self_test.cases import CASES, compare, function_of

from mtpserve.core.sampling import SamplingParams
from mtpserve.llm import LLM
from mtpserve.text.outputs import Completion

PROMPTS = ["import os\n\ndef read_lines(path):", "class Stack:\n    def push(self, item):"]
TOKENS = 128
SPECULATION = {"plain": "none", "speculation": "NEXTN"}


@dataclass(frozen=True, slots=True)
class CheckResult:
    name: str
    passed: bool
    seconds: float
    detail: str


def kernel_set(device: str) -> str:
    """Returns which kernels a device runs: triton, cpu, or torch, which is the reference itself."""
    if device == "cuda" or os.environ.get("TRITON_INTERPRET") == "1":
        return "triton"
    try:
        library()
    except Unavailable:
        return "torch"
    return "cpu"


def check_kernels(device: str) -> Iterator[CheckResult]:
    """One result for each kernel that the device has. A kernel that raises has failed."""
    kernels = kernel_set(device)
    # The interpreter's bfloat16 products are wrong.
    dtype = torch.float32 if device == "cpu" and kernels == "triton" else torch.bfloat16
    for case in CASES:
        name = {"triton": case.triton, "cpu": case.cpu, "torch": ""}[kernels]
        if name == "":
            continue
        start = perf_counter()
        try:
            difference = compare(case, function_of(name), torch.device(device), dtype)
            passed, detail = difference.good, f"largest difference {difference.error:.1e}"
            if not passed:
                detail += f", more than {difference.tolerance:.0e}"
        except Exception as error:
            passed, detail = False, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        yield CheckResult(case.name, passed, perf_counter() - start, detail)


def check_engine(device: str) -> Iterator[CheckResult]:
    """The bundled model's greedy text with speculation is that without, token by token."""
    start, rates = perf_counter(), {}
    texts: dict[str, list[Completion]] = {}
    try:
        for name, algorithm in SPECULATION.items():
            with LLM(
                model="demo", device=device, speculative_algorithm=algorithm, max_total_tokens=4096
            ) as llm:
                greedy = SamplingParams(max_tokens=TOKENS, temperature=0.0)
                llm.generate(PROMPTS[:1], greedy)  # compiles what is not compiled
                begun = perf_counter()
                texts[name] = llm.generate(PROMPTS, greedy)
                rates[name] = sum(len(text.tokens) for text in texts[name]) / (perf_counter() - begun)
    except Exception as error:
        detail = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        yield CheckResult("engine", False, perf_counter() - start, detail)
        return
    equal = [text.tokens for text in texts["plain"]] == [text.tokens for text in texts["speculation"]]
    speeds = ", ".join(f"{name} {rate:.0f} tokens/s" for name, rate in rates.items())
    detail = f"{'equal' if equal else 'different'} texts; {speeds}"
    yield CheckResult("engine", equal, perf_counter() - start, detail)
