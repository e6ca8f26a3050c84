"""Tables of the results of peers/gpu.py, `peers_gpu_*.json`: mtpserve beside other engines on a GPU, and each step beside its bound.

As long as there are none, a table of what was measured before: the 475 M parameters of never_slower.py on an H100.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from peers.gpu_engines.record import KIND, OWN, Record, Row
from peers.gpu_engines.shapes import StepTraffic, inflated_demo

from common.leaves import Table

Rounded = Callable[[float, int], str]
Markdown = Callable[[list[str], list[list[str]]], str]
Key = tuple[str, int, int]  # model, drafts, batch
NAMES = {"vllm": "vLLM", "loop": "torch.compile loop"}
MODELS = {"qwen2.5-0.5b": "Qwen2.5-0.5B", "mimo-7b": "MiMo-7B", "qwen3-8b": "Qwen3-8B"}
COMMAND = "python benchmarks/peers/gpu.py --vllm VLLM/bin/python --json benchmarks/results/peers_gpu_h100.json"
CLOSE = 1.1  # below it a ratio has two places
# Data sheets' bandwidth in bytes per second, by torch's name of the device: for results that did not measure it.
STATED_BANDWIDTH = {"NVIDIA H100 80GB HBM3": 3.35e12}
# The newest runs of never_slower.py with the 475 M parameters and captured steps.
EARLIER = "never_slower_475m_batches_h100", "never_slower_128_graphs_h100"
EARLIER_MODEL, EARLIER_ARMS = "large", {"plain": 0, "k = 3": 3}
EARLIER_PROMPT = 128  # never_slower.PROMPT


@dataclass(frozen=True, slots=True)
class GpuResult:
    """One file: `command`, `commit` and `device` of its context, and its numbers."""

    name: str
    command: str
    commit: str
    device: str
    record: Record


@dataclass(frozen=True, slots=True)
class Cell:
    """mtpserve's row of a model, number of drafts and batch, and the others' by engine. All are from one result."""

    own: Row
    others: dict[str, Row]
    result: str

    def ratio(self, engine: str) -> float:
        """mtpserve's tokens per second over this engine's."""
        return self.own.tokens_per_s / self.others[engine].tokens_per_s

    def steady_ratio(self, engine: str) -> float:
        """The same while the batch is whole."""
        return self.own.steady_tokens_per_s / self.others[engine].steady_tokens_per_s

    @property
    def worst(self) -> float:
        """The least of both ratios to any engine. Without other engines 1: nothing is lost."""
        return min((ratio(engine) for engine in self.others for ratio in (self.ratio, self.steady_ratio)), default=1.0)


def results(folder: Path) -> list[GpuResult]:
    """The newest first. Raises SystemExit for a file that is no result of peers/gpu.py, and leaves out dry runs."""
    found = [result_of(path) for path in sorted(folder.glob("peers_gpu_*.json"))]
    return sorted((result for result in found if not result.record.toy), key=lambda result: result.record.date, reverse=True)


def result_of(path: Path) -> GpuResult:
    try:
        whole = json.loads(path.read_text(encoding="utf-8"))
        record = msgspec.convert(whole["numbers"], Record)
        names = {name: str(whole[name]) for name in ("command", "commit", "device")}
    except (ValueError, KeyError, TypeError) as error:
        raise SystemExit(f"{path}: is no result of peers/gpu.py: {type(error).__name__}: {error}") from None
    if record.kind != KIND:
        raise SystemExit(f"{path}: kind must be {KIND}, got {record.kind}")
    return GpuResult(path.stem, **names, record=record)


def cells_of(result: GpuResult) -> dict[Key, Cell]:
    rows = {(row.model, row.drafts, row.batch, row.engine): row for row in result.record.rows}
    found = {}
    for (model, drafts, batch, engine), row in rows.items():
        if engine == OWN:
            others = {other: rows[key] for other in NAMES if (key := (model, drafts, batch, other)) in rows}
            found[model, drafts, batch] = Cell(row, others, result.name)
    return found


def newest_cells(found: Sequence[GpuResult]) -> list[Cell]:
    """Each from the newest result that has it; `found` begins with the newest. Those that were lost come first, the worst before the
    others."""
    cells: dict[Key, Cell] = {}
    for result in found:
        cells = cells_of(result) | cells
    lost = sorted((cell for cell in cells.values() if cell.worst < 1), key=lambda cell: cell.worst)
    held = sorted((cell for cell in cells.values() if cell.worst >= 1), key=rank)
    return lost + held


def rank(cell: Cell) -> tuple[int, int, int]:
    models = list(MODELS)
    return models.index(cell.own.model) if cell.own.model in models else len(models), cell.own.drafts, cell.own.batch


def text(folder: Path, rounded: Rounded, markdown: Markdown) -> str:
    """The block of docs/measured.md: tables by device, or what there is instead."""
    if not (found := results(folder)):
        return unmeasured(folder, rounded, markdown)
    parts = []
    for device in dict.fromkeys(result.device for result in found):
        here = [result for result in found if result.device == device]
        parts.append(f"**{device}**: {EXPLAINED}\n\n{markdown_table(newest_cells(here), rounded, markdown)}\n{sources(here, rounded)}")
    return "\n".join(parts)


EXPLAINED = (
    "output tokens per second of requests that arrive together, 128 tokens in and out, and milliseconds a step while the batch is whole. "
    "Below 1 × mtpserve is slower: these cells come first, in bold. The bound is what a step reads over the read bandwidth"
)


def markdown_table(cells: list[Cell], rounded: Rounded, markdown: Markdown) -> str:
    engines = [engine for engine in NAMES if any(engine in cell.others for cell in cells)]
    head = ["", "batch", "tokens/s", *(f"over {NAMES[engine]}" for engine in engines), "ms a step"]
    head += [*(f"{NAMES[engine]}, ms" for engine in engines), "bound, ms", "step / bound"]
    rows = []
    for cell in cells:
        ratios = [times(cell.ratio(engine), rounded) if engine in cell.others else "" for engine in engines]
        steps = [step_of(cell, engine, rounded) if engine in cell.others else "" for engine in engines]
        own = cell.own
        title = f"{MODELS.get(own.model, own.model)}, {drafts_in_words(own.drafts)}"
        bound = ["", ""] if own.bound_ms is None else [rounded(own.bound_ms, 2), times(own.step_ms / own.bound_ms, rounded)]
        rows.append([title, str(own.batch), f"{own.tokens_per_s:,.0f}", *ratios, rounded(own.step_ms, 2), *steps, *bound])
    return markdown(head, rows)


def drafts_in_words(drafts: int) -> str:
    return "plain" if drafts == 0 else "one draft" if drafts == 1 else f"{drafts} drafts"


def times(ratio: float, rounded: Rounded) -> str:
    shown = f"{rounded(ratio, 2 if ratio < CLOSE else 1)} ×"
    return f"**{shown}**" if ratio < 1 else shown


def step_of(cell: Cell, engine: str, rounded: Rounded) -> str:
    shown = rounded(cell.others[engine].step_ms, 2)
    return f"**{shown}**" if cell.steady_ratio(engine) < 1 else shown


def sources(found: Iterable[GpuResult], rounded: Rounded) -> str:
    """Where the numbers come from, and what was not measured."""
    lines, skipped = list[str](), dict[str, None]()
    for result in found:
        record = result.record
        versions = ", ".join(f"{NAMES[engine]} {version}" for engine, version in versions_of(record).items())
        bandwidth = f"{rounded(record.read_bandwidth / 1e12, 2)} TB/s, {record.read_bandwidth_source}"
        where = f"{result.device}, {result.commit}, {record.date[:10]}; {versions or 'alone'}; read bandwidth {bandwidth}"
        lines.append(f"- `{result.command}` ({where}; [file](../benchmarks/results/{result.name}.json))")
        skipped |= dict.fromkeys(one.skipped for one in record.skipped)
    more = ["", "Not measured:", "", *(f"- {why}" for why in skipped)] if skipped else []
    return "\n".join([*lines, *more]) + "\n"


def versions_of(record: Record) -> dict[str, str]:
    return {start.engine: start.settings["version"] for start in record.starts if start.engine in NAMES and "version" in start.settings}


@dataclass(frozen=True, slots=True)
class EarlierRow:
    """The 475 M parameters with some requests and drafts. `step_ms`: the whole time over the number of steps, prompts included."""

    requests: int
    drafts: int
    tokens_per_s: float
    step_ms: float
    bound_ms: float
    result: str

    @property
    def over_bound(self) -> float:
        return self.step_ms / self.bound_ms


def earlier_rows(folder: Path) -> Iterator[EarlierRow]:
    """Greedy rows. `accept_length` of these files is that of their deepest fixed arm, k = 3."""
    traffic = StepTraffic(inflated_demo())
    for name in EARLIER:
        whole = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
        numbers, bandwidth = whole["numbers"], STATED_BANDWIDTH[whole["device"]]
        context = EARLIER_PROMPT + numbers["tokens"] / 2
        for row in numbers["rows"]:
            if row["model"] != EARLIER_MODEL or row["temperature"]:
                continue
            for arm, drafts in EARLIER_ARMS.items():
                rate, requests = row["tokens_per_s"][arm], row["requests"]
                step_ms = 1e3 * requests * (row["accept_length"] if drafts else 1) / rate
                yield EarlierRow(requests, drafts, rate, step_ms, 1e3 * traffic.step_bytes(requests, context, drafts) / bandwidth, name)


def unmeasured(folder: Path, rounded: Rounded, markdown: Markdown) -> str:
    rows = sorted(earlier_rows(folder), key=lambda row: row.over_bound, reverse=True)
    files = [json.loads((folder / f"{name}.json").read_text(encoding="utf-8")) for name in EARLIER]
    device, bandwidth = files[0]["device"], STATED_BANDWIDTH[files[0]["device"]]
    head = ["requests", "", "tokens/s", "ms a step", "bound, ms", "step / bound"]
    table = markdown(
        head,
        [
            [str(row.requests), drafts_in_words(row.drafts), f"{row.tokens_per_s:,.0f}", rounded(row.step_ms, 2), rounded(row.bound_ms, 2),
             times(row.over_bound, rounded)]
            for row in rows
        ],
    )  # fmt: skip
    lines = [
        f"**Published shapes ({', '.join(MODELS.values())}) have not been measured on a GPU yet**, neither alone nor beside another",
        f"engine. This measures them: `{COMMAND}`",
        "([how to get vLLM](../benchmarks/README.md#vllm-beside-mtpserve-on-a-hopper-gpu-without-network)).",
        "",
        "What was measured is a mixture of experts of 475 M parameters in 36 layers, in DeepSeek-V3's layout, without other engines.",
        "Steps far from their bound come first. Greedy, prompts as long as answers. Milliseconds a step are the whole time over the",
        "number of steps, so prompts are in them. The bound is the weights that a step's rows hit on average and the KV cache, over",
        f"the {rounded(bandwidth / 1e12, 2)} TB/s of the device's data sheet; no bandwidth was measured:",
        "",
        table,
    ]
    lines += [
        f"- `{file['command']}` ({device}, {file['commit']}; [file](../benchmarks/results/{name}.json))"
        for name, file in zip(EARLIER, files, strict=True)
    ]
    return "\n".join(lines) + "\n"


def page_tables(folder: Path) -> list[Table]:
    """For the page of all results: a table for each device, of its newest results."""
    found = results(folder)
    tables = []
    for device in dict.fromkeys(result.device for result in found):
        cells = newest_cells([result for result in found if result.device == device])
        columns = ["model", "drafts", "batch", "tokens_per_s", "step_ms", "bound_ms", "step_over_bound"]
        columns += [f"over_{engine}{part}" for engine in NAMES for part in ("", "_steady")]
        tables.append(Table(device, [*columns, "result"], [page_row(cell) for cell in cells]))
    return tables


def page_row(cell: Cell) -> list[Any]:
    own = cell.own
    over = None if own.bound_ms is None else own.step_ms / own.bound_ms
    ratios = [of(engine) if engine in cell.others else None for engine in NAMES for of in (cell.ratio, cell.steady_ratio)]
    return [own.model, own.drafts, own.batch, own.tokens_per_s, own.step_ms, own.bound_ms, over, *ratios, cell.result]


def screen(record: Record) -> str:
    """For a terminal, when a run ends."""
    lines = []
    for cell in newest_cells([GpuResult("", "", "", "", record)]):
        own = cell.own
        ratios = ", ".join(f"{cell.ratio(other):.2f} × {NAMES[other]} (steady {cell.steady_ratio(other):.2f})" for other in cell.others)
        bound = "" if own.bound_ms is None else f", {own.step_ms:.3f} ms a step of a bound of {own.bound_ms:.3f}"
        lost = "LOST " if cell.worst < 1 else ""
        lines.append(f"{lost}{own.model} k={own.drafts} batch {own.batch}: {own.tokens_per_s:.1f} tok/s{bound}; {ratios or 'alone'}")
    return "\n".join([*lines, *(f"not measured: {one.skipped}" for one in record.skipped)])
