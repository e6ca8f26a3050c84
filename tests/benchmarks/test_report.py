"""The page of all results, and that the tables of README.md and docs/measured.md are what the results say."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
CONTEXT = {"command": "python benchmarks/x.py", "commit": "abc1234", "device": "a <fast> one", "versions": {"python": "3.11", "torch": "2"}}


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import report

    return report


def test_the_tables_in_the_docs_are_the_results(report: Any) -> None:
    texts = [page.read_text(encoding="utf-8") for page in report.PAGES_OF_TABLES]
    assert {hit[2] for text in texts for hit in report.MARK.finditer(text)} == set(report.MEASURED)
    assert texts == list(map(report.with_tables, texts)), "python benchmarks/report.py --tables"


def test_every_result_is_on_the_page_with_where_it_comes_from(report: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "drawn", lambda tables: [])
    files = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
    results = report.read()
    page = report.page(results)
    assert [each.name for each in results] == [file.stem for file in files]
    for file, result in zip(files, results, strict=True):
        assert f'id="{file.stem}"' in page
        known = json.loads(file.read_text())
        assert {"command", "commit", "device", "versions"} <= {name for name, _ in result.context}, file.name
        assert result.tables, file.name
        assert report.escape(known["command"]) in page


def test_of_an_unknown_layout_all_leaves_are_shown(report: Any, tmp_path: Path) -> None:
    numbers = {"a": 1, "b": {"c": [1, 2.5], "d": {"e": "text", "f": None}}, "list": [[{"x": 0.12345}], 7, "<b>"], "long": list(range(40))}
    (tmp_path / "odd.json").write_text(json.dumps(CONTEXT | {"numbers": numbers}))
    (tmp_path / "plain.json").write_text(json.dumps(CONTEXT | {"tokens": {"per_s": 12345.6}}))
    (tmp_path / "list.json").write_text(json.dumps([{"m": 1, "n": 2}, {"m": 3}]))
    (tmp_path / "README.md").write_text("| file | what |\n|---|---|\n| `odd.json`, `plain.json` | `odd` & plain |\n")
    odd, listed, plain = sorted(report.read(tmp_path), key=lambda each: each.name != "odd")
    cells = {report.text_of(cell) for table in odd.tables for row in table.rows for cell in row}
    assert {"a", "1", "c", "1, 2.5", "e", "text", "f", "", "0.1235", "7", "<b>", "39"} <= cells
    assert [(table.columns, table.rows) for table in listed.tables] == [(["m", "n"], [[1, 2], [3, None]])]
    assert [(table.path, table.rows) for table in plain.tables] == [("tokens", [["per_s", 12345.6]])]
    page = report.page([odd, listed, plain])
    assert "<code>odd</code> &amp; plain" in page and "a &lt;fast&gt; one" in page and "12,346" in page and "<b>" not in page


def test_a_broken_file_is_named(report: Any, tmp_path: Path) -> None:
    (tmp_path / "odd.json").write_text("{")
    with pytest.raises(SystemExit, match=r"odd\.json: is not valid JSON"):
        report.read(tmp_path)


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="matplotlib is not installed")
def test_plots(report: Any) -> None:
    table = report.Table(
        "medians", ["server", "mode", "concurrency", "tokens_per_s"], [["a", "p", 1, 5.0], ["a", "p", 4, 9.0], ["b", "p", 1, None]]
    )
    bars = report.Table("by_case", ["", "ms"], [["one", 1.5], ["two", 3.0]])
    lines, drawn = report.drawn([table, bars, report.Table("other", ["", "ms"], [["one", 1.5]])])
    assert lines.startswith("<svg") and "a, p" in lines and "tokens per s" in lines
    assert "two" in drawn and "1.5" in drawn
    assert report.drawn([table]) == [lines], "the same table gives the same picture"


def test_the_page_is_written(report: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "one.json").write_text(json.dumps(CONTEXT | {"numbers": {"a": 1}}))
    monkeypatch.setattr("sys.argv", ["report.py", "--results", str(tmp_path), "--out", str(tmp_path / "new" / "index.html")])
    report.main()
    assert capsys.readouterr().out.startswith("1 results in ")
    assert "one" in (tmp_path / "new" / "index.html").read_text()
