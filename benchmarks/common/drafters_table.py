"""The README's table of drafters, from what heads/compare.py has written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

FILES = {
    "drafters_demo": "The demo model (6.4 M parameters)",
    "drafters_demo_deep": "The demo with 36 layers, of which the further ones change nothing",
    "drafters_smollm2": "SmolLM2-135M-Instruct",
}
Cell = dict[str, Any]


def text(results: Path, markdown: Callable[[list[str], list[list[str]]], str]) -> str:
    parts = []
    for name, title in FILES.items():
        if (file := results / f"{name}.json").is_file():
            found = json.loads(file.read_text(encoding="utf-8"))
            where = f"`{found['command']}`, {found['cores']} cores of {found['device']}, {found['commit']}"
            parts.append(f"**{title}**, T = 0 / T = 0.8 ({where}):\n\n{table(found['numbers']['cells'], markdown)}")
    return "\n".join(parts)


def table(cells: list[Cell], markdown: Callable[[list[str], list[list[str]]], str]) -> str:
    temperatures, batches = (sorted({cell[key] for cell in cells}) for key in ("temperature", "batch_size"))
    depths = sorted({cell["num_steps"] for cell in cells if is_chain(cell)})
    head = ["", "parameters", *(f"k = {depth}" for depth in depths), "best tree", "drafting, ms"]
    rows = []
    for drafter in dict.fromkeys(cell["drafter"] for cell in cells):
        own = [cell for cell in cells if cell["drafter"] == drafter and cell["num_steps"] > 0]

        def each(value: Callable[[list[Cell]], float | None], own: list[Cell] = own) -> str:
            """Of each temperature; "-" where it was not measured."""
            values = [value([cell for cell in own if cell["temperature"] == temperature]) for temperature in temperatures]
            return " / ".join("-" if value is None else f"{value:.2f}" for value in values)

        size = max(cell["parameters"] for cell in own)
        lengths = [each(lambda some, depth=depth: length(some, batches[-1], depth)) for depth in depths]  # type: ignore[misc]
        fastest = [each(lambda some, batch=batch: speed(some, batch)) for batch in batches]  # type: ignore[misc]
        times = [each(lambda some: drafting(some, batches[0])), *fastest, each(lambda some: overhead(some, batches[0]))]
        rows.append([drafter, f"{size / 1e6:.2f} M" if size else "-", *lengths, each(lambda some: tree(some, batches[-1])), *times])
    return markdown([*head, *(f"S at {batch}" for batch in batches), f"M at {batches[0]}"], rows)


def is_chain(cell: Cell) -> bool:
    return bool(cell["eagle_topk"] == 1 and cell["num_steps"] > 0)


def length(cells: list[Cell], batch: int, depth: int) -> float | None:
    """Acceptance length, of the largest batch, which has the most requests."""
    found = [cell for cell in cells if is_chain(cell) and cell["batch_size"] == batch and cell["num_steps"] == depth]
    return found[0]["accept_length"] if found else None


def tree(cells: list[Cell], batch: int) -> float | None:
    return max((cell["accept_length"] for cell in cells if not is_chain(cell) and cell["batch_size"] == batch), default=None)


def drafting(cells: list[Cell], batch: int) -> float | None:
    """Of three drafts."""
    found = [cell for cell in cells if is_chain(cell) and cell["batch_size"] == batch and cell["num_steps"] == 3]
    return found[0]["parts_ms"]["draft"] if found else None


def fastest(cells: list[Cell], batch: int) -> Cell | None:
    return max((cell for cell in cells if cell["batch_size"] == batch), key=lambda cell: float(cell["speedup"]), default=None)


def speed(cells: list[Cell], batch: int) -> float | None:
    found = fastest(cells, batch)
    return None if found is None else found["speedup"]


def overhead(cells: list[Cell], batch: int) -> float | None:
    found = fastest(cells, batch)
    return None if found is None else found["overhead"]
