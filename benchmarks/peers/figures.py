"""What peers/cpu.py measures: one load's figures, medians and extremes over rounds, and the tables on the screen."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Any

from rich.table import Table

RATIOS = ("tokens_per_s", "ttft_ms", "tpot_ms")
NUMBERS = (*RATIOS, "itl_ms", "accept_length", "same_text", "client_share")
SPREAD = (*RATIOS, "itl_ms")  # of these the extremes too
OWN = "mtpserve"


@dataclass(frozen=True, slots=True)
class Measured:
    """One load on one started engine. Milliseconds."""

    model: str
    mode: str
    server: str
    engine: str
    concurrency: int
    round: int
    tokens_per_s: float
    ttft_ms: float
    tpot_ms: float
    itl_ms: float
    accept_length: float | None
    same_text: float
    client_share: float | None  # of one core's time, that the client took


@dataclass(frozen=True, slots=True)
class Start:
    model: str
    mode: str
    server: str
    round: int
    health_s: float
    first_completion_s: float
    busy: float  # share of the cores that others took just before


@dataclass(frozen=True, slots=True)
class Skipped:
    """What was not measured, and in one sentence why. `engine` and `mode` as in the medians."""

    engine: str
    server: str
    model: str
    mode: str
    skipped: str


def figures(answer: dict[str, Any], tokens: int) -> dict[str, Any]:
    """Of one load: what client.py saw → fields of Measured."""
    requests = answer["requests"]
    seconds = max(r["end"] for r in requests) - min(r["sent"] for r in requests)
    gaps = [later - earlier for r in requests for earlier, later in zip(r["arrivals"], r["arrivals"][1:], strict=False)]
    own = answer["cpu_seconds"]
    return {
        "tokens_per_s": tokens * len(requests) / seconds,
        "ttft_ms": 1e3 * median(r["arrivals"][0] - r["sent"] for r in requests),
        "tpot_ms": 1e3 * median((r["arrivals"][-1] - r["arrivals"][0]) / max(1, tokens - 1) for r in requests),
        "itl_ms": 1e3 * median(gaps or [0.0]),
        "client_share": None if own is None else own / seconds,
    }


def accept_length(before: dict[str, float], after: dict[str, float]) -> float | None:
    drafts = after["drafts"] - before["drafts"]
    return 1 + (after["accepted"] - before["accepted"]) / drafts if drafts else None


Cell = tuple[str, str, int]  # model, mode, requests at once


def medians(measured: list[Measured]) -> list[dict[str, Any]]:
    """A row for each cell and server: medians, extremes, and mtpserve's medians over the server's, or over the fastest peer's."""
    out = []
    cells: dict[Cell, list[Measured]] = {}
    for row in measured:
        cells.setdefault((row.model, row.mode, row.concurrency), []).append(row)
    for cell, rows in cells.items():
        servers = {server: [row for row in rows if row.server == server] for server in dict.fromkeys(row.server for row in rows)}
        found = {server: medians_of(of) for server, of in servers.items()}
        peers = [server for server in found if server != OWN]
        fastest = max(peers, key=lambda server: found[server]["tokens_per_s"], default=None)
        for server, numbers in found.items():
            against = fastest if server == OWN else server
            ratios = {name: None if against is None or OWN not in found else found[OWN][name] / found[against][name] for name in RATIOS}
            head = {"model": cell[0], "mode": cell[1], "concurrency": cell[2], "server": server, "engine": servers[server][0].engine}
            out.append(head | numbers | {f"mtpserve_over_{name}": ratio for name, ratio in ratios.items()})
    return out


def medians_of(rows: list[Measured]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in NUMBERS:
        values = [value for row in rows if (value := getattr(row, name)) is not None]
        found[name] = median(values) if values else None
        if name in SPREAD:
            found |= {f"least_{name}": min(values), f"most_{name}": max(values)}
    return found | {"rounds": len(rows)}


def shown(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def range_of(row: dict[str, Any], name: str, digits: int = 1) -> str:
    return f"{shown(row[f'least_{name}'], digits)} … {shown(row[f'most_{name}'], digits)}"


def tables(rows: list[dict[str, Any]], starts: list[Start]) -> list[Table]:
    """`rows`: what medians() gives."""
    loads = Table(title="medians over rounds; ×: mtpserve's over this engine's, in its own rows over the fastest other's")
    for name in ("model", "mode", "at once", "engine"):
        loads.add_column(name)
    for name in ("tok/s", "least … most", "×", "TTFT ms", "least … most", "×", "TPOT ms", "×", "ITL ms", "accepted", "same text"):
        loads.add_column(name, justify="right")
    for row in rows:
        ratios = [shown(row[f"mtpserve_over_{number}"], 2) for number in RATIOS]
        loads.add_row(
            row["model"], row["mode"], str(row["concurrency"]), row["server"], shown(row["tokens_per_s"]), range_of(row, "tokens_per_s"),
            ratios[0], shown(row["ttft_ms"]), range_of(row, "ttft_ms", 0), ratios[1], shown(row["tpot_ms"], 2), ratios[2],
            shown(row["itl_ms"], 2), shown(row["accept_length"], 2), shown(row["same_text"], 2),
        )  # fmt: skip
    begins = Table(title="seconds from an engine's start: each round")
    for name in ("model", "mode", "engine", "until it is ready", "until the first completion"):
        begins.add_column(name)
    for key in dict.fromkeys((start.model, start.mode, start.server) for start in starts):
        of = [start for start in starts if (start.model, start.mode, start.server) == key]
        begins.add_row(*key, " ".join(shown(start.health_s) for start in of), " ".join(shown(start.first_completion_s) for start in of))
    return [loads, begins]
