"""Tables of the results of peers/gpu.py, `peers_gpu_*.json`: mtpserve beside other engines on a GPU, and each step beside its bound.

As long as there are none, the fallback: what never_slower.py measured with 475 M parameters on an H100.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from peers.gpu_engines.record import KIND, MTPSERVE, Record, Row

from common.leaves import Table
from common.shapes import SHAPES, StepBytes

Rounded = Callable[[float, int], str]
Markdown = Callable[[list[str], list[list[str]]], str]
CellKey = tuple[str, int, int]  # model, drafts, batch
ENGINE_NAMES = {"vllm": "vLLM", "loop": "torch.compile loop"}
MODEL_NAMES = {"qwen2.5-0.5b": "Qwen2.5-0.5B", "mimo-7b": "MiMo-7B", "qwen3-8b": "Qwen3-8B"}
COMMAND = "python benchmarks/peers/gpu.py --vllm VLLM/bin/python --json benchmarks/results/peers_gpu_h100.json"
CLOSE = 1.1  # below it a ratio has two places
EXPLANATION = (
    "output tokens per second of requests that arrive together, prompts included, and milliseconds a step while the batch is whole. "
    "`over` is mtpserve's tokens per second over that engine's: where one of both is slower the cell comes first, in bold. "
    "The bound is what a step reads over the read bandwidth"
)
# Data sheets' bandwidth in bytes per second, by torch's name of the device: for results that did not measure it.
STATED_BANDWIDTH = {"NVIDIA H100 80GB HBM3": 3.35e12}
FALLBACK_FILES = "never_slower_475m_batches_h100", "never_slower_128_graphs_h100"
FALLBACK_MODEL, FALLBACK_ARMS = "large", {"plain": 0, "k = 3": 3}  # names there, and drafts
FALLBACK_PROMPT = 128  # never_slower.PROMPT


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

    row: Row
    peers: dict[str, Row]
    result: str

    def ratio(self, engine: str) -> float:
        """mtpserve's tokens per second over this engine's."""
        return self.row.tokens_per_s / self.peers[engine].tokens_per_s

    def steady_ratio(self, engine: str) -> float:
        """The same while the batch is whole."""
        return self.row.steady_tokens_per_s / self.peers[engine].steady_tokens_per_s

    @property
    def worst_ratio(self) -> float:
        """The least of both ratios to any engine. Without other engines 1: nothing is lost."""
        return min((ratio(engine) for engine in self.peers for ratio in (self.ratio, self.steady_ratio)), default=1.0)

    @property
    def over_bound(self) -> float | None:
        return None if self.row.bound_ms is None else self.row.step_ms / self.row.bound_ms


def results(folder: Path) -> list[GpuResult]:
    """The newest first. Raises SystemExit for a file that is no result of peers/gpu.py, and leaves out dry runs."""
    every_result = map(result_of, sorted(folder.glob("peers_gpu_*.json")))
    return sorted((result for result in every_result if not result.record.toy), key=lambda result: result.record.date, reverse=True)


def result_of(path: Path) -> GpuResult:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        record = msgspec.convert(content["numbers"], Record)
        context = {name: str(content[name]) for name in ("command", "commit", "device")}
    except (ValueError, KeyError, TypeError) as error:
        raise SystemExit(f"{path}: is no result of peers/gpu.py: {type(error).__name__}: {error}") from None
    if record.kind != KIND:
        raise SystemExit(f"{path}: kind must be {KIND}, got {record.kind}")
    return GpuResult(path.stem, **context, record=record)


def cells_of(result: GpuResult) -> dict[CellKey, Cell]:
    rows = {(row.model, row.drafts, row.batch, row.engine): row for row in result.record.rows}
    cells = {}
    for (model, drafts, batch, engine), row in rows.items():
        if engine == MTPSERVE:
            peers = {peer: rows[key] for peer in ENGINE_NAMES if (key := (model, drafts, batch, peer)) in rows}
            cells[model, drafts, batch] = Cell(row, peers, result.name)
    return cells


def newest_cells(gpu_results: Sequence[GpuResult]) -> list[Cell]:
    """Each from the first of the results that has it. Losing cells come first, the worst before the others."""
    cells: dict[CellKey, Cell] = {}
    for result in gpu_results:
        cells = cells_of(result) | cells
    losing_cells = sorted((cell for cell in cells.values() if cell.worst_ratio < 1), key=lambda cell: cell.worst_ratio)
    return losing_cells + sorted((cell for cell in cells.values() if cell.worst_ratio >= 1), key=rank)


def rank(cell: Cell) -> tuple[int, int, int]:
    models = list(MODEL_NAMES)
    return models.index(cell.row.model) if cell.row.model in models else len(models), cell.row.drafts, cell.row.batch


def by_device(gpu_results: Sequence[GpuResult]) -> dict[str, list[GpuResult]]:
    devices = dict.fromkeys(result.device for result in gpu_results)
    return {device: [result for result in gpu_results if result.device == device] for device in devices}


def text(folder: Path, rounded: Rounded, markdown: Markdown) -> str:
    """The block of docs/measured.md: a table for each device, or the fallback."""
    parts = []
    for device, gpu_results in by_device(results(folder)).items():
        table = markdown_table(newest_cells(gpu_results), rounded, markdown)
        parts.append(f"**{device}**: {EXPLANATION}.\n\n{table}\n{sources(gpu_results, rounded)}")
    return "\n".join(parts) if parts else fallback_text(folder, rounded, markdown)


def short(folder: Path, rounded: Rounded, markdown: Markdown) -> str:
    """The block of README.md: of each device a row for each model and number of drafts, and a column for each batch."""
    parts = []
    for device, gpu_results in by_device(results(folder)).items():
        cells = {(cell.row.model, cell.row.drafts, cell.row.batch): cell for cell in sorted(newest_cells(gpu_results), key=rank)}
        batches = sorted({batch for _, _, batch in cells})
        rows = dict.fromkeys((model, drafts) for model, drafts, _ in cells)
        head = [f"{device}, tokens/s", *(f"{batch} request{'s' if batch > 1 else ''}" for batch in batches)]
        lines = [
            [f"{MODEL_NAMES.get(model, model)}, {drafts_name(drafts)}"]
            + [short_cell(cells[key], rounded) if (key := (model, drafts, batch)) in cells else "" for batch in batches]
            for model, drafts in rows
        ]
        parts.append(f"{markdown(head, lines)}\n{short_source(gpu_results[0])}\n")
    return "\n".join(parts)


def short_cell(cell: Cell, rounded: Rounded) -> str:
    ratios = ", ".join(f"{times(cell.ratio(engine), rounded)} {ENGINE_NAMES[engine]}" for engine in cell.peers)
    return f"{cell.row.tokens_per_s:,.0f} ({ratios})" if ratios else f"{cell.row.tokens_per_s:,.0f}"


def short_source(result: GpuResult) -> str:
    record = result.record
    names = " and ".join([f"mtpserve {result.commit}", *(f"{ENGINE_NAMES[engine]} {text}" for engine, text in versions_of(record).items())])
    rate = f" Drafts are accepted at a fixed rate: {rounded_curve(record)}." if any(row.drafts for row in record.rows) else ""
    return f"{names}, one run, {record.date[:10]}; {record.prompt} tokens in and {record.output} out, random weights.{rate}"


def rounded_curve(record: Record) -> str:
    deepest = max(row.drafts for row in record.rows)
    return f"{record.accept_curve[deepest - 1]} tokens a step with {drafts_name(deepest)}"


def markdown_table(cells: list[Cell], rounded: Rounded, markdown: Markdown) -> str:
    engines = [engine for engine in ENGINE_NAMES if any(engine in cell.peers for cell in cells)]
    names = [ENGINE_NAMES[engine] for engine in engines]
    head = ["", "batch", "tokens/s", *(f"over {name}" for name in names), "ms a step", *(f"{name}, ms" for name in names)]

    def line(cell: Cell) -> list[str]:
        row = cell.row
        ratios = [times(cell.ratio(engine), rounded) if engine in cell.peers else "" for engine in engines]
        steps = [peer_step(cell, engine, rounded) if engine in cell.peers else "" for engine in engines]
        title = f"{MODEL_NAMES.get(row.model, row.model)}, {drafts_name(row.drafts)}"
        bound = "" if row.bound_ms is None else rounded(row.bound_ms, 2)
        over_bound = "" if cell.over_bound is None else times(cell.over_bound, rounded)
        return [title, str(row.batch), f"{row.tokens_per_s:,.0f}", *ratios, rounded(row.step_ms, 2), *steps, bound, over_bound]

    return markdown([*head, "bound, ms", "step / bound"], list(map(line, cells)))


def drafts_name(drafts: int) -> str:
    return ("plain", "one draft", "two drafts", "three drafts")[drafts]


def times(ratio: float, rounded: Rounded) -> str:
    number = f"{rounded(ratio, 2 if ratio < CLOSE else 1)} ×"
    return f"**{number}**" if ratio < 1 else number


def peer_step(cell: Cell, engine: str, rounded: Rounded) -> str:
    number = rounded(cell.peers[engine].step_ms, 2)
    return f"**{number}**" if cell.steady_ratio(engine) < 1 else number


def sources(gpu_results: Iterable[GpuResult], rounded: Rounded) -> str:
    """Where the numbers come from, and what was not measured."""
    lines, reasons = list[str](), dict[str, None]()
    for result in gpu_results:
        record = result.record
        versions = ", ".join(f"{ENGINE_NAMES[engine]} {version}" for engine, version in versions_of(record).items())
        bandwidth = f"{rounded(record.read_bandwidth / 1e12, 2)} TB/s, {record.read_bandwidth_source}"
        load = f"{record.prompt} tokens in and {record.output} out"
        context = f"{result.device}, {result.commit}, {record.date[:10]}; {versions or 'alone'}; {load}; read bandwidth {bandwidth}"
        lines.append(f"- `{result.command}` ({context}; {link(result.name)})")
        reasons |= dict.fromkeys(arm.reason for arm in record.skipped)
    return "\n".join([*lines, *(["", "Not measured:", "", *(f"- {reason}" for reason in reasons)] if reasons else [])]) + "\n"


def link(name: str) -> str:
    """From a page of docs/."""
    return f"[file](../benchmarks/results/{name}.json)"


def versions_of(record: Record) -> dict[str, str]:
    return {
        start.engine: start.settings["version"] for start in record.starts if start.engine in ENGINE_NAMES and "version" in start.settings
    }


@dataclass(frozen=True, slots=True)
class FallbackRow:
    """475 M parameters with some requests and drafts. `step_ms`: the whole time over the number of steps, prompts included."""

    requests: int
    drafts: int
    tokens_per_s: float
    step_ms: float
    bound_ms: float

    @property
    def over_bound(self) -> float:
        return self.step_ms / self.bound_ms


def fallback_rows(content: dict[str, Any]) -> Iterator[FallbackRow]:
    """Greedy rows of one file. Its `accept_length` is that of the deepest fixed arm, k = 3. A request has half of its answer on average."""
    step_bytes, bandwidth = StepBytes(SHAPES["475m"]), STATED_BANDWIDTH[content["device"]]
    tokens = FALLBACK_PROMPT + content["numbers"]["tokens"] // 2
    for row in content["numbers"]["rows"]:
        if row["model"] != FALLBACK_MODEL or row["temperature"]:
            continue
        for arm, drafts in FALLBACK_ARMS.items():
            tokens_per_s, requests = row["tokens_per_s"][arm], row["requests"]
            step_ms = 1e3 * requests * (row["accept_length"] if drafts else 1) / tokens_per_s
            yield FallbackRow(requests, drafts, tokens_per_s, step_ms, 1e3 * step_bytes.step(requests, tokens, drafts) / bandwidth)


def fallback_text(folder: Path, rounded: Rounded, markdown: Markdown) -> str:
    """Says that published shapes were not measured, how to, and what was: steps far from their bound first."""
    contents = {name: json.loads((folder / f"{name}.json").read_text(encoding="utf-8")) for name in FALLBACK_FILES}
    rows = sorted((row for content in contents.values() for row in fallback_rows(content)), key=lambda row: row.over_bound, reverse=True)
    bandwidth = rounded(max(STATED_BANDWIDTH[content["device"]] for content in contents.values()) / 1e12, 2)
    lines = [
        f"**Published shapes ({', '.join(MODEL_NAMES.values())}) have not been measured on a GPU yet**, neither alone nor beside another",
        f"engine. This measures them: `{COMMAND}`",
        "([how to get vLLM](../benchmarks/README.md#vllm-beside-mtpserve-on-a-hopper-gpu-without-network)).",
        "",
        "What was measured is a mixture of experts of 475 M parameters in 36 layers, in DeepSeek-V3's layout, without other engines.",
        "Steps far from their bound come first. Greedy, prompts as long as answers. Milliseconds a step are the whole time over the",
        "number of steps, so prompts are in them. The bound is the weights that a step's rows hit on average and the KV cache, over",
        f"the {bandwidth} TB/s of the device's data sheet; no bandwidth was measured. Changes after the commits below are not in it:",
        "",
        markdown(["requests", "", "tokens/s", "ms a step", "bound, ms", "step / bound"], [fallback_line(row, rounded) for row in rows]),
    ]
    lines += [f"- `{content['command']}` ({content['device']}, {content['commit']}; {link(name)})" for name, content in contents.items()]
    return "\n".join(lines) + "\n"


def fallback_line(row: FallbackRow, rounded: Rounded) -> list[str]:
    numbers = [f"{row.tokens_per_s:,.0f}", rounded(row.step_ms, 2), rounded(row.bound_ms, 2), times(row.over_bound, rounded)]
    return [str(row.requests), drafts_name(row.drafts), *numbers]


def page_tables(folder: Path) -> list[Table]:
    """For the page of all results: a table for each device, of its newest results."""
    columns = ["model", "drafts", "batch", "tokens_per_s", "step_ms", "bound_ms", "step_over_bound"]
    columns += [f"over_{engine}{part}" for engine in ENGINE_NAMES for part in ("", "_steady")]
    devices = by_device(results(folder)).items()
    return [Table(device, [*columns, "result"], list(map(page_row, newest_cells(gpu_results)))) for device, gpu_results in devices]


def page_row(cell: Cell) -> list[Any]:
    row = cell.row
    ratios = [ratio(engine) if engine in cell.peers else None for engine in ENGINE_NAMES for ratio in (cell.ratio, cell.steady_ratio)]
    return [row.model, row.drafts, row.batch, row.tokens_per_s, row.step_ms, row.bound_ms, cell.over_bound, *ratios, cell.result]


def screen(record: Record) -> str:
    """For a terminal, when a run ends."""
    lines = []
    for cell in newest_cells([GpuResult("", "", "", "", record)]):
        row = cell.row
        ratios = ", ".join(f"{cell.ratio(peer):.2f} × {ENGINE_NAMES[peer]} (steady {cell.steady_ratio(peer):.2f})" for peer in cell.peers)
        bound = "" if row.bound_ms is None else f", {row.step_ms:.3f} ms a step of a bound of {row.bound_ms:.3f}"
        mark = "LOST " if cell.worst_ratio < 1 else ""
        lines.append(f"{mark}{row.model} k={row.drafts} batch {row.batch}: {row.tokens_per_s:.1f} tok/s{bound}; {ratios or 'alone'}")
    return "\n".join([*lines, *(f"not measured: {arm.reason}" for arm in record.skipped)])
