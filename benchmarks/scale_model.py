"""What MTP gains on 8, 16 and 128 GPUs, on paper: nothing is run. Each step's time follows from bytes, operations and messages.

    python benchmarks/scale_model.py [--json FILE]

The model is DeepSeek-V3 (https://arxiv.org/abs/2412.19437 §4.2) in float8, the GPUs are H200s. A pass over `rows` rows of each GPU takes

    Σ over parts of max(bytes / memory bandwidth, operations / peak)  +  kernels × gap  +  messages

    tensor parallel     each GPU has an eighth of every matrix, and the ranks sum twice in each layer
    DP attention + EP   each GPU has its own requests and all of attention, and 1 / N of the experts: each layer's rows go to the owners of
                        their experts and come back (dispatch and combine)

A step with k drafts is a pass over k + 1 rows of each request, then k passes of the MTP layer: the first over the same rows, the others
over one of each request. Speed-up = acceptance length × plain step / step with drafts.

Where the numbers are from:
  GPU         4.3 TB/s copied and 790 TFLOP/s in bfloat16 as measured on H200, twice that less a tenth in float8 (DeepGEMM: 1.55 P at best);
              2.2 µs a dependent kernel in a captured step, fitted to a published one of 100 kernels
  attention   660 TFLOP/s in latent attention: FlashMLA's README
  messages    DeepEP V1's low-latency kernels, docs/legacy.md: 128 rows of 7168, 8 experts, float8 out and bfloat16 back, in µs by ranks.
              What is left of them after bytes / line rate (50 GB/s between machines, 160 within, of its H800) is their latency; an H200 has
              450 within. Sums: graph-captured MSCCL++ on eight H200, SGLang's pull request 22734
  published   SGLang's blog on MTP with large expert parallelism of 2025-07-17, TensorRT-LLM's tech_blog1, vLLM's blog of 2026-05-11
  acceptance  TensorRT-LLM's blog on DeepSeek-R1's MTP: 1.92, 2.58, 2.82 with 1, 2, 3 drafts; V3 accepts 85 to 90 % of first drafts
  experts hit 256 (1 - (1 - 8 / 256)^n) of a layer by n rows; rows of one request resemble each other: each after the first counts 0.7
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from common.record import save

US = 1e-6
LAYERS, DENSE, HIDDEN, VOCAB, HEADS = 61, 3, 7168, 129280, 128
EXPERTS, TOP_K, EXPERT = 256, 8, 3 * HIDDEN * 2048  # numbers of one expert, also of the shared one
Q_RANK, RANK, ROPE, NOPE, VALUE = 1536, 512, 64, 128, 128
# Of attention: what every rank of tensor parallel has whole, and what is divided.
WHOLE = HIDDEN * (Q_RANK + RANK + ROPE)
DIVIDED = HEADS * (Q_RANK * (NOPE + ROPE) + RANK * (NOPE + VALUE) + VALUE * HIDDEN)
KV_BYTES = 2 * (RANK + ROPE)  # of a token in a layer

BANDWIDTH, FLOPS16, FLOPS8, ATTENTION, GAP = 4.3e12, 790e12, 1.4e15, 660e12, 2.2 * US
KERNELS = 12  # of a layer, fused as far as published engines fuse

OUT, BACK = HIDDEN + HIDDEN // 128 * 4, 2 * HIDDEN  # bytes of a row and expert: float8 with scales out, bfloat16 back
DEEPEP = {8: (77, 114), 16: (118, 195), 32: (155, 273), 64: (173, 314), 128: (192, 369), 256: (194, 360)}  # µs, 128 rows a rank
BETWEEN, WITHIN_H800, WITHIN = 50e9, 160e9, 450e9
SUM_LATENCY, SUM_BANDWIDTH = 8 * US, 1 / (6.2 * US / 2**20)
GLOO = 450 * US  # a gather of two processes on one machine, as measured for this project: what its rounds add per layer
LENGTHS = (1.0, 1.92, 2.58, 2.82)
ALIKE = 0.7  # rows that a request's further rows count, of those that choose experts


@dataclass(frozen=True, slots=True)
class Scenario:
    """`overlap`: two half batches in turns, one computes while the other's rows travel."""

    name: str
    gpus: int
    tensor: bool  # tensor parallel, else DP attention and EP
    requests: int  # of each GPU with EP, of all together with tensor parallel
    context: int
    drafts: int
    published: str
    overlap: bool = False
    rounds: bool = False  # as this project exchanges rows today: launched kernel by kernel, with a gather of the hosts


SCENARIOS = (
    Scenario("8 GPUs, TP, 1 request", 8, True, 1, 2048, 1, "1.78–1.87 (TensorRT-LLM and vLLM, 8 × B200 and B300)"),
    Scenario("8 GPUs, TP, 1 request", 8, True, 1, 2048, 3, "1.8 (SGLang, H200); 2.28 (TensorRT-LLM, 8 × B200)"),
    Scenario("8 GPUs, TP, 50 requests", 8, True, 50, 2048, 3, "1.35–1.44 (HPC-AI's tutorial, R1, 8 × H200, prompts included)"),
    Scenario("16 GPUs, DP attention + EP", 16, False, 2, 65536, 2, "1.35 (SGLang's blog, against its baseline with overlapped scheduling)"),
    Scenario("16 GPUs, DP attention + EP", 16, False, 2, 65536, 3, "1.36 (the same)"),
    Scenario("96 of 128 GPUs decode, DP attention + EP", 96, False, 128, 2050, 1, "1.142 (SGLang's blog, 4 nodes prefill, 12 decode)"),
    Scenario("the same, two half batches in turns", 96, False, 128, 2050, 1, "1.142", overlap=True),
    Scenario("the same, 16 requests each", 96, False, 16, 2050, 1, "–", overlap=True),
    Scenario("16 GPUs, with this project's rounds", 16, False, 2, 65536, 2, "–", rounds=True),
)


def hit(rows: float) -> float:
    """Experts of one layer that so many rows choose."""
    return EXPERTS * (1 - (1 - TOP_K / EXPERTS) ** rows)


def counted(requests: float, each: int) -> float:
    """Rows, as far as they choose experts of their own."""
    return requests * (1 + (each - 1) * ALIKE)


def latency(ranks: int, way: int) -> float:
    """Seconds of DeepEP's kernels that bytes do not explain, of dispatch (0) or combine (1); those of the next size that was measured."""
    measured = next(size for size in DEEPEP if size >= ranks)
    return DEEPEP[measured][way] * US - travel(measured, 128, (OUT, BACK)[way], WITHIN_H800)


def travel(ranks: int, rows: float, size: int, within: float) -> float:
    """Seconds for the bytes of a GPU's rows: those for other machines by its network card, the others by NVLink, at the same time."""
    outside = 1 - 8 / ranks if ranks > 8 else 0.0
    sent = rows * TOP_K * size
    return max(sent * outside / BETWEEN, sent * (1 - outside) / within)


def exchange(ranks: int, rows: float) -> float:
    """Of one layer: dispatch and combine."""
    return sum(latency(ranks, way) + travel(ranks, rows, size, WITHIN) for way, size in ((0, OUT), (1, BACK)))


def product(numbers: float, rows: float, bytes_each: float = 1.0, peak: float = FLOPS8) -> float:
    """Seconds to multiply rows by a matrix of so many numbers on one GPU."""
    return max(numbers * bytes_each / BANDWIDTH, 2 * numbers * rows / peak)


def layers(case: Scenario, number: int, requests: float, each: int, dense: int = 0) -> dict[str, float]:
    """Seconds of so many layers, `dense` of them without experts, on one GPU, for `each` rows of each of its requests."""
    rows, share = requests * each, case.gpus if case.tensor else 1
    experts = number - dense
    kv = requests * case.context * KV_BYTES  # of a layer; with tensor parallel every GPU has it whole
    scores = 2 * HEADS / share * case.context * (2 * RANK + ROPE) * rows
    all_rows = counted(requests if case.tensor else requests * case.gpus, each)
    of_all = rows if case.tensor else rows * case.gpus
    expert = max(hit(all_rows) * EXPERT / case.gpus / BANDWIDTH, 2 * of_all * TOP_K * EXPERT / case.gpus / FLOPS8)
    made = {
        "attention": number * (product(WHOLE + DIVIDED / share, rows) + max(kv / BANDWIDTH, scores / ATTENTION)),
        "experts": experts * (expert + product(EXPERT / share, rows)) + dense * product(3 * HIDDEN * 18432 / share, rows),
        "kernels": number * KERNELS * GAP,
    }
    if case.tensor:
        made["messages"] = number * 2 * (SUM_LATENCY + rows * 2 * HIDDEN / SUM_BANDWIDTH)
    elif case.overlap:
        half = exchange(case.gpus, rows / 2)
        computed = sum(made.values()) - made["kernels"]
        made["kernels"] *= 2
        # Each half's rows travel while the other half is computed.
        made["messages"] = max(0.0, 2 * experts * half - computed)
    else:
        made["messages"] = experts * (exchange(case.gpus, rows) + (GLOO if case.rounds else 0.0))
    return made


def head(case: Scenario, rows: float) -> float:
    return product(VOCAB * HIDDEN / (case.gpus if case.tensor else 1), rows, 2, FLOPS16)


def step(case: Scenario, drafts: int) -> dict[str, float]:
    """Seconds, by part."""
    parts = layers(case, LAYERS, case.requests, drafts + 1, DENSE)
    parts["head"] = head(case, case.requests * (drafts + 1))
    drafting = 0.0
    for number in range(drafts):
        each = drafts + 1 if number == 0 else 1
        fusing = product(2 * HIDDEN * HIDDEN, case.requests * each, 2, FLOPS16)
        drafting += sum(layers(case, 1, case.requests, each).values()) + fusing + head(case, case.requests)
    return parts | {"drafting": drafting}


def compared(case: Scenario) -> dict[str, Any]:
    plain, drafted = step(case, 0), step(case, case.drafts)
    before, after, length = sum(plain.values()), sum(drafted.values()), LENGTHS[case.drafts]
    return {
        "scenario": case.name, "requests": case.requests, "context": case.context, "drafts": case.drafts,
        "plain_ms": round(before * 1e3, 2), "step_ms": round(after * 1e3, 2), "acceptance_length": length,
        "step_over_plain": round(after / before, 2), "speed_up": round(length * before / after, 2), "published": case.published,
        **{f"{part}_ms": round(drafted[part] * 1e3, 2) for part in drafted},
        **{f"plain_{part}_ms": round(plain[part] * 1e3, 2) for part in plain if part != "drafting"},
    }  # fmt: skip


def bytes_of_a_pass(case: Scenario, each: int) -> dict[str, float]:
    """What one GPU sends in one layer, in bytes."""
    rows = case.requests * each
    return {"dispatch": rows * TOP_K * OUT, "combine": rows * TOP_K * BACK}


def main() -> None:
    parser = argparse.ArgumentParser(description="What MTP gains on 8, 16 and 128 GPUs, on paper.")
    parser.add_argument("--json", metavar="FILE")
    chosen = parser.parse_args()
    rows = [compared(case) for case in SCENARIOS]
    print(f"{'':42}   k   plain ms    step ms   M     AL   speed-up   published")
    for row in rows:
        print(
            f"{row['scenario']:42} {row['drafts']:3} {row['plain_ms']:10.2f} {row['step_ms']:10.2f} {row['step_over_plain']:5.2f} "
            f"{row['acceptance_length']:5.2f} {row['speed_up']:8.2f}     {row['published']}"
        )
    exchanged = []
    for case in (SCENARIOS[3], SCENARIOS[5], replace(SCENARIOS[5], gpus=8, name="8 GPUs, 128 requests each")):
        for each in (1, case.drafts + 1):
            sent = bytes_of_a_pass(case, each)
            seconds = exchange(case.gpus, case.requests * each)
            exchanged.append({"scenario": case.name, "rows": case.requests * each, **sent, "us_per_layer": round(seconds / US, 1)})
            print(f"{case.name}, {case.requests * each} rows: {sum(sent.values()) / 1e6:.2f} MB and {seconds / US:.0f} µs per layer")
    save(chosen.json, {"steps": rows, "exchanges": exchanged})


if __name__ == "__main__":
    main()
