"""All results on one page, and the tables of README.md and docs/measured.md that come from them.

    python benchmarks/report.py             benchmarks/results/*.json → build/report/index.html
    python benchmarks/report.py --tables    rewrites these two between `<!-- results: NAME -->` and `<!-- end of NAME -->`

The page has no external resources. Every result is shown with its command, commit, device and versions; of what has an unknown layout the
scalar leaves are shown. Plots need matplotlib, which the extra `bench` brings. A table there is a function in MEASURED.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal
from html import escape
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from common import drafters_table, gpu_tables, peers_table
from common.leaves import Table, tables_of, text_of
from common.plots import drawn

ROOT = Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "benchmarks" / "results", ROOT / "build" / "report" / "index.html"
PAGES_OF_TABLES = ROOT / "README.md", ROOT / "docs" / "measured.md"
MARK = re.compile(r"(<!-- results: (\w+) -->\n).*?(<!-- end of \2 -->)", re.DOTALL)
CONTEXT = ("command", "commit", "device", "processor", "instruction_sets", "cores", "threads", "cpu_capability", "versions")
FOLDED = 30  # rows from which a table is shown folded


@dataclass(frozen=True, slots=True)
class Result:
    name: str
    what: str  # in words, from the results' README
    context: list[tuple[str, str]]  # command, commit, device, versions …
    tables: list[Table]


def read(folder: Path = RESULTS) -> list[Result]:
    words = descriptions(folder / "README.md")
    return [result_of(path, words.get(path.name, "")) for path in sorted(folder.glob("*.json"))]


def result_of(path: Path, what: str) -> Result:
    try:
        whole = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SystemExit(f"{path}: is not valid JSON: {error}") from None
    known = whole if isinstance(whole, dict) else {"numbers": whole}
    context = [(name.replace("_", " "), worded(known[name])) for name in CONTEXT if known.get(name) is not None]
    numbers = known["numbers"] if "numbers" in known else {name: value for name, value in known.items() if name not in CONTEXT}
    return Result(path.stem, what, context, tables_of(numbers))


def worded(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {each}" for name, each in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def descriptions(readme: Path) -> dict[str, str]:
    """File name → what the table in the results' README says of it."""
    rows = re.findall(r"^\| (`.+?) \| (.+) \|$", readme.read_text(encoding="utf-8") if readme.is_file() else "", re.MULTILINE)
    return {name: what for names, what in rows for name in re.findall(r"`([^`]+\.json)`", names)}


def page(results: list[Result], gpu: Sequence[Table] = ()) -> str:
    """`gpu`: what gpu_tables.page_tables gives, shown first."""
    links = "".join(f'<li><a href="#{escape(each.name)}">{escape(each.name)}</a></li>' for each in results)
    sections = gpu_section(gpu) + "".join(map(section, results))
    intro = "Ratios hold within one file only: other machines give others."
    return f"{HEAD}<body><h1>mtpserve: results of the benchmarks</h1><p>{intro}</p><nav><ul>{links}</ul></nav>{sections}</body></html>\n"


def gpu_section(tables: Sequence[Table]) -> str:
    if not tables:
        return ""
    caption = "mtpserve's tokens per second over each other engine's, and each step over its bound. Lost cells come first."
    return f'<section id="gpu"><h2>On a GPU</h2><p>{escape(caption)}</p>{"".join(map(table_html, tables))}</section>'


def section(result: Result) -> str:
    what = re.sub(r"`([^`]*)`", r"<code>\1</code>", escape(result.what))
    plots = "".join(f"<figure>{svg}</figure>" for svg in drawn(result.tables))
    context = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in result.context)
    tables = "".join(map(table_html, result.tables))
    return f'<section id="{escape(result.name)}"><h2>{escape(result.name)}</h2><p>{what}</p>{plots}{tables}<dl>{context}</dl></section>'


def table_html(table: Table) -> str:
    def cell(value: Any, tag: str = "td") -> str:
        right = ' class="n"' if isinstance(value, int | float) and not isinstance(value, bool) else ""
        return f"<{tag}{right}>{escape(text_of(value))}</{tag}>"

    head = "".join(cell(column.replace("_", " "), "th") for column in table.columns) if any(table.columns[1:]) else ""
    rows = "".join(f"<tr>{''.join(map(cell, row))}</tr>" for row in table.rows)
    made = f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
    title = escape(table.path.replace("_", " "))
    if len(table.rows) > FOLDED:
        return f"<details><summary>{title or 'numbers'}: {len(table.rows)} rows</summary>{made}</details>"
    return f"<h3>{title}</h3>{made}" if title else made


HEAD = """<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>mtpserve: results</title><style>
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif }
body { max-width: 64rem; margin: 2rem auto; padding: 0 1rem }
nav ul { columns: 3 14rem; padding-left: 1rem } section { border-top: 1px solid #8886; margin-top: 2rem }
h3 { margin: 1rem 0 .3rem; font-size: 1rem } .wide { overflow-x: auto } table { border-collapse: collapse; font-size: .85rem }
th, td { padding: .15rem .6rem; border-bottom: 1px solid #8883; text-align: left; vertical-align: top } .n { text-align: right }
td.n { font-variant-numeric: tabular-nums; white-space: nowrap } dl { font-size: .8rem; opacity: .8 }
dt { float: left; clear: left; min-width: 9rem } dd { margin-left: 9rem; overflow-wrap: anywhere }
figure { margin: 1rem 0; background: #fff; color-scheme: light } figure svg { max-width: 100%; height: auto }
</style></head>"""


def numbers_of(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["numbers"]


def rounded(value: float, places: int) -> str:
    """Half up, as on paper."""
    return str(Decimal(str(value)).quantize(Decimal(1).scaleb(-places), ROUND_HALF_UP))


def markdown(head: list[str], rows: list[list[str]]) -> str:
    def line(cells: list[str]) -> str:
        return "|" + "|".join(f" {cell} " if cell else " " for cell in cells) + "|\n"

    return line(head) + "|---" * len(head) + "|\n" + "".join(map(line, rows))


def decoding() -> str:
    speed, lengths = numbers_of("decode_xeon_2core")["by_drafts"], numbers_of("acceptance_demo")["by_drafts"]
    head = ["drafts", "tokens/s against plain decoding", "acceptance length, held-out files"]
    return markdown(head, [[n, f"{rounded(speed[n]['ratio'], 2)} ×", rounded(lengths[n]["accept_length"], 2)] for n in lengths])


def against_vllm() -> str:
    """mtpserve's tokens per second over those of other engines; over vLLM's alone as long as there are only results from before."""
    if found := peers_table.results(RESULTS):
        return peers_table.text(found, rounded, markdown)
    at_once, rows = (1, 4, 16, 64), []
    for file, model in (("small", "6.4 M"), ("258m", "258 M"), ("500m", "500 M")):
        medians = [each for each in numbers_of(f"peers_{file}_zen3_2core")["medians"] if each["server"] == "mtpserve"]
        for mode, name in (("plain", "plain"), ("mtp", "three drafts")):
            ratios = {each["concurrency"]: each["mtpserve_over_tokens_per_s"] for each in medians if each["mode"] == mode}
            rows.append([f"{model}, {name}", *(f"{rounded(ratios[n], 1)} ×" if n in ratios else "" for n in at_once)])
    return markdown(["model, requests at once", *map(str, at_once)], rows)


def gpu_short() -> str:
    return gpu_tables.short(RESULTS, rounded, markdown)


def drafters() -> str:
    return drafters_table.text(RESULTS, markdown)


def gpu() -> str:
    return gpu_tables.text(RESULTS, rounded, markdown)


MEASURED: dict[str, Callable[[], str]] = {
    "decoding": decoding,
    "against_vllm": against_vllm,
    "gpu_short": gpu_short,
    "drafters": drafters,
    "gpu": gpu,
}


def with_tables(text: str) -> str:
    """A page with every marked table as the results say."""

    def made(hit: re.Match[str]) -> str:
        if hit[2] not in MEASURED:
            raise SystemExit(f"there is no table {hit[2]!r}: {', '.join(MEASURED)}")
        return f"{hit[1]}\n{MEASURED[hit[2]]()}\n{hit[3]}"

    return MARK.sub(made, text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", action="store_true", help="rewrite the tables of README.md and docs/measured.md and make no page")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER")
    parser.add_argument("--out", type=Path, default=PAGE, metavar="FILE")
    args = parser.parse_args()
    if args.tables:
        for page_of_tables in PAGES_OF_TABLES:
            page_of_tables.write_text(with_tables(page_of_tables.read_text(encoding="utf-8")), encoding="utf-8")
        return
    args.out.parent.mkdir(parents=True, exist_ok=True)
    results = read(args.results)
    args.out.write_text(page(results, gpu_tables.page_tables(args.results)), encoding="utf-8")
    print(f"{len(results)} results in {args.out}")


if __name__ == "__main__":
    main()
