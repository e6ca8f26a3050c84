"""The tables in docs/ that are made from the code: options from the config dataclasses, metrics from the server's own help texts.

make snapshot        (python -m tests.house.surface writes them, between `<!-- options: SECTION -->` and `<!-- end of SECTION -->`)
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import prometheus_client
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric

from mtpserve.cli.options import Option, all_options
from mtpserve.config import SECTIONS
from mtpserve.server.observe.metrics import MTPServe
from mtpserve.server.observe.observed import Rates, Scrape
from tests.house.tree import ROOT
from tests.server.fake_client import FakeClient

OPTIONS, OPERATING = ROOT / "docs" / "options.md", ROOT / "docs" / "operating.md"
MARK = re.compile(r"(<!-- (options|metrics): ([\w-]+) -->\n).*?(<!-- end of \3 -->)", re.DOTALL)
DEFAULT = re.compile(r" \(default: ([^()]*(?:\([^()]*\)[^()]*)*)\)$")  # where the dataclass has None, the help ends with it


def cell(text: str) -> str:
    return text.replace("|", r"\|").replace("<", "&lt;")


def row(option: Option) -> list[str]:
    help, default = option.help, option.default
    if (said := DEFAULT.search(help)) is not None:
        help, shown = help[: said.start()], said[1]
    elif option.kind is bool:
        shown = "on" if default else "off"
    else:
        shown = "none" if default in (None, ()) else f"`{default}`"
    names = ", ".join(f"`--{name}`" for name in option.spellings)
    off = f"; off: `--no-{option.spellings[0]}`" if default is True else ""
    values = [choice for choice in option.choices or () if choice not in re.findall(r"[\w.-]+", help)]
    also = f" ({', '.join(f'`{value}`' for value in values)})" if values else ""
    return [names, cell(shown), cell(help + off) + also]


def options(section: str) -> list[list[str]]:
    return [["option", "default", ""], *(row(option) for option in all_options({section: SECTIONS[section]}))]


def exported() -> Iterable[Metric]:
    """The server's own metrics, without those of its process and those under other servers' names."""
    client, registry = FakeClient(), CollectorRegistry()
    stats = client.stats()
    stats.draft_tokens_by_source = stats.accepted_tokens_by_source = {"mtp": 1}
    prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
    ours = MTPServe(registry, lambda: Scrape(stats, Rates(0, 0, 0, 0), client.card, True, client.engines), client.card.name, 1)
    ours.http_request("/health", "GET", 200)
    return registry.collect()


def metrics(part: str) -> list[list[str]]:
    rows = [["metric", "labels", ""]]
    for family in exported():
        kind = {CounterMetricFamily: "counter", HistogramMetricFamily: "histogram"}.get(type(family), family.type)
        if kind == part:
            labels = {label for sample in family.samples for label in sample.labels} - {"le", "model_name"}
            name = f"{family.name}_total" if part == "counter" else family.name
            rows.append([f"`{name}`", ", ".join(f"`{label}`" for label in sorted(labels)), cell(family.documentation)])
    return rows


def table(rows: list[list[str]]) -> str:
    head, *others = [f"| {' | '.join(cells)} |\n".replace("|  |", "| |") for cells in rows]
    return f"{head}{'|---' * len(rows[0])}|\n{''.join(others)}"


def renewed(text: str) -> str:
    made = {"options": options, "metrics": metrics}
    return MARK.sub(lambda hit: f"{hit[1]}\n{table(made[hit[2]](hit[3]))}\n{hit[4]}", text)


def write() -> None:
    for page in (OPTIONS, OPERATING):
        page.write_text(renewed(page.read_text(encoding="utf-8")), encoding="utf-8")
