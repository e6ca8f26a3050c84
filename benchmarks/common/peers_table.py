"""The table of mtpserve against other engines, from results of peers/cpu.py, with what was lost and what was not measured."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OWN = "mtpserve"
SIZES = {"small": "6.4 M", "258m": "258 M", "500m": "500 M"}
NAMES = {"vllm": "vLLM", "transformers": "transformers", "mistral.rs": "mistral.rs"}
MODES = {"plain": "plain", "mtp": "three drafts"}
COMPARED = (("plain", "plain"), ("mtp", "mtp"), ("mtp", "plain"))  # mtpserve's, theirs
CHIPS = {"zen": "Zen", "spr": "Sapphire Rapids", "neoverse": "Neoverse"}
CLOSE = 1.1  # below it a ratio has two places
Rows = list[dict[str, Any]]
Rounded = Callable[[float, int], str]
Markdown = Callable[[list[str], list[list[str]]], str]


@dataclass(frozen=True, slots=True)
class Result:
    name: str
    whole: dict[str, Any]

    @property
    def numbers(self) -> dict[str, Any]:
        return dict(self.whole["numbers"])


def worded(model: str) -> str:
    return f"{SIZES[model]} parameters" if model in SIZES else f"the {model} model"


def results(folder: Path) -> list[Result]:
    """Those of several engines; `peers_*.json` from before have no `losses`."""
    read = [(path.stem, json.loads(path.read_text(encoding="utf-8"))) for path in sorted(folder.glob("peers_*.json"))]
    found = [Result(name, whole) for name, whole in read if "losses" in whole["numbers"]]
    return sorted(found, key=lambda result: min(map(rank, result.numbers["medians"])))


def rank(row: dict[str, Any]) -> int:
    """Small models first, others last."""
    return list(SIZES).index(row["model"]) if row["model"] in SIZES else len(SIZES)


def text(found: list[Result], rounded: Rounded, markdown: Markdown) -> str:
    return "\n".join([table(found, rounded, markdown), *sources(found), "", *sentences(found)]) + "\n"


def table(found: list[Result], rounded: Rounded, markdown: Markdown) -> str:
    at_once = sorted({row["concurrency"] for result in found for row in result.numbers["medians"]})
    rows = [row for result in found for row in lines(result, at_once, rounded)]
    return markdown(["mtpserve's tokens per second over", "", "on", *map(str, at_once)], rows)


def chip(result: Result) -> str:
    """As the file's name has it: peers_small_zen4_2core is of a Zen 4."""
    hit = re.search(r"_(zen|spr|neoverse)(\d*)_", result.name)
    return result.whole["device"] if hit is None else f"{CHIPS[hit[1]]} {hit[2]}".strip()


def lines(result: Result, at_once: list[int], rounded: Rounded) -> Iterator[list[str]]:
    """One for each model, pair of modes and other engine. Of an engine's variants the fastest counts; what was lost is bold."""
    medians = result.numbers["medians"]
    for model in sorted(dict.fromkeys(row["model"] for row in medians), key=lambda name: rank({"model": name})):
        for mode, theirs in COMPARED:
            for engine in dict.fromkeys(row["engine"] for row in medians if row["server"] != OWN):
                cells = [cell(medians, model, (mode, theirs), engine, many, rounded) for many in at_once]
                if any(cells):
                    other = NAMES.get(engine, engine)
                    over = other if mode == theirs else f"{other}, {MODES[theirs]}"
                    yield [f"{SIZES.get(model, model)}, {MODES[mode]}", over, chip(result), *cells]


def cell(medians: Rows, model: str, modes: tuple[str, str], engine: str, many: int, rounded: Rounded) -> str:
    here = [row for row in medians if (row["model"], row["concurrency"]) == (model, many)]
    own = [row["tokens_per_s"] for row in here if (row["server"], row["mode"]) == (OWN, modes[0])]
    other = [row["tokens_per_s"] for row in here if (row["engine"], row["mode"]) == (engine, modes[1])]
    if not own or not other:
        return ""
    ratio = own[0] / max(other)
    shown = f"{rounded(ratio, 2 if ratio < CLOSE else 1)} ×"
    return f"**{shown}**" if ratio < 1 else shown


def sources(found: list[Result]) -> list[str]:
    """Where the numbers come from."""
    made = []
    for result in found:
        peers = result.numbers["peers"].items()
        versions = ", ".join(f"{NAMES.get(engine, engine)} {next(iter(of.values()))}" for engine, of in peers)
        where = f"{result.whole['cores']} cores of {result.whole['device']}, {result.whole['commit']}"
        made.append(f"- `{result.whole['command']}` ({where}; {versions or 'alone'}; [file](../benchmarks/results/{result.name}.json))")
    return made


def sentences(found: list[Result]) -> list[str]:
    lost = [each["sentence"] for result in found for each in result.numbers["losses"]]
    skipped = dict.fromkeys(each["skipped"] for result in found for each in result.numbers["skipped"])
    made = ["Lost:", "", *(f"- {sentence}" for sentence in lost)] if lost else ["No cell was lost."]
    return made + (["", "Not measured:", "", *(f"- {why}" for why in skipped)] if skipped else [])
