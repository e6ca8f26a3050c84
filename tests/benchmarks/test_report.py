"""The page of all results, and that the tables of README.md and docs/measured.md are what the results say."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
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


def test_every_result_is_table_with_where_it_comes_from(report: Any, monkeypatch: pytest.MonkeyPatch) -> None:
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


def record_of(*rows: Any, date: str = "2026-01-02T00:00:00+00:00", toy: bool = False) -> dict[str, Any]:
    from peers.gpu_engines.record import KIND, Record, SkippedArm, Start

    skipped_arms = [SkippedArm("vllm", "qwen3-8b", 0, "vllm:qwen3-8b:0 ended by itself: E")]
    starts = [Start("vllm", "mimo-7b", 0, 9.0, {"version": "0.26"})]
    numbers = asdict(Record(KIND, date, toy, 3e12, "measured", 128, 128, [1.84, 2.5, 2.99], list(rows), skipped_arms, starts))
    return {"command": "python x.py", "commit": "abc", "device": "a GPU", "numbers": numbers}


def rows_of() -> list[Any]:
    from peers.gpu_engines.record import Row

    row = Row("mtpserve", "mimo-7b", 0, 1, 200.0, 190.0, 210.0, 4.0, 250.0, 1.0, 0, 192.0, 3e9, bound_ms=1.0)
    vllm = replace(row, engine="vllm", tokens_per_s=100.0, steady_tokens_per_s=125.0, step_ms=8.0)
    many = replace(row, batch=128, tokens_per_s=50.0), replace(vllm, batch=128)
    steady = replace(row, batch=8), replace(vllm, batch=8, steady_tokens_per_s=260.0, step_ms=3.85)
    return [row, vllm, *many, *steady, replace(vllm, engine="loop", tokens_per_s=1000 / 7), replace(row, drafts=3)]


def test_the_readmes_gpu_table_has_a_column_for_each_batch(report: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    assert report.gpu_short() == ""
    (tmp_path / "peers_gpu_new.json").write_text(json.dumps(record_of(*rows_of())))
    assert report.gpu_short().splitlines() == [
        "| a GPU, tokens/s | 1 request | 8 requests | 128 requests |",
        "|---|---|---|---|",
        "| MiMo-7B, plain | 200 (2.0 × vLLM, 1.4 × torch.compile loop) | 200 (2.0 × vLLM) | 50 (**0.50 ×** vLLM) |",
        "| MiMo-7B, three drafts | 200 | | |",
        "",
        "mtpserve abc and vLLM 0.26, one run, 2026-01-02; 128 tokens in and 128 out, random weights. "
        "Drafts are accepted at a fixed rate: 2.99 tokens a step with three drafts.",
    ]


def test_the_gpu_table_begins_with_what_was_lost(report: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    (tmp_path / "peers_gpu_new.json").write_text(json.dumps(record_of(*rows_of())))
    old_rows = [replace(row, tokens_per_s=1.0) for row in (*rows_of()[:1], replace(rows_of()[0], model="qwen3-8b"))]
    (tmp_path / "peers_gpu_a_old.json").write_text(json.dumps(record_of(*old_rows, date="2025-12-31T00:00:00+00:00")))
    (tmp_path / "peers_gpu_toy.json").write_text(json.dumps(record_of(toy=True)))
    title, table, notes = report.gpu().split("\n\n", 2)
    assert title.startswith("**a GPU**: output tokens per second")
    assert table.splitlines() == [
        "| | batch | tokens/s | over vLLM | over torch.compile loop | ms a step | vLLM, ms | torch.compile loop, ms | bound, ms "
        "| step / bound |",
        "|---|---|---|---|---|---|---|---|---|---|",
        "| MiMo-7B, plain | 128 | 50 | **0.50 ×** | | 4.00 | 8.00 | | 1.00 | 4.0 × |",
        "| MiMo-7B, plain | 8 | 200 | 2.0 × | | 4.00 | **3.85** | | 1.00 | 4.0 × |",
        "| MiMo-7B, plain | 1 | 200 | 2.0 × | 1.4 × | 4.00 | 8.00 | 8.00 | 1.00 | 4.0 × |",
        "| MiMo-7B, three drafts | 1 | 200 | | | 4.00 | | | 1.00 | 4.0 × |",
        "| Qwen3-8B, plain | 1 | 1 | | | 4.00 | | | 1.00 | 4.0 × |",
    ]
    assert notes.startswith(
        "- `python x.py` (a GPU, abc, 2026-01-02; vLLM 0.26; 128 tokens in and 128 out; read bandwidth 3.00 TB/s, measured; "
        "[file](../benchmarks/results/peers_gpu_new.json))"
    )
    assert notes.endswith("Not measured:\n\n- vllm:qwen3-8b:0 ended by itself: E\n")
    (table,) = report.gpu_tables.page_tables(tmp_path)
    assert table.column("batch") == [128, 8, 1, 1, 1] and table.column("over_vllm")[:2] == [0.5, 2.0]
    assert "over vllm steady" in report.page([], [table]) and 'id="gpu"' not in report.page([])


def test_a_file_that_is_no_result_of_a_gpu_is_named(report: Any, tmp_path: Path) -> None:
    content = record_of(*rows_of())
    for change, message in (({"kind": "other"}, "kind must be peers_gpu/1, got other"), ({"rows": [{}]}, "is no result of peers/gpu.py")):
        (tmp_path / "peers_gpu_x.json").write_text(json.dumps(content | {"numbers": content["numbers"] | change}))
        with pytest.raises(SystemExit, match=message):
            report.gpu_tables.results(tmp_path)


def test_without_results_of_gpus_the_docs_say_so_and_show_what_was_measured(
    report: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from common.gpu_tables import FALLBACK_FILES
    from peers import gpu

    for name in FALLBACK_FILES:
        (tmp_path / f"{name}.json").write_text((report.RESULTS / f"{name}.json").read_text())
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    text = report.gpu()
    assert "have not been measured on a GPU yet" in text
    command = text.split("`")[1].split()
    assert command[:2] == ["python", "benchmarks/peers/gpu.py"]
    monkeypatch.chdir(ROOT)
    args = gpu.arguments([sys.executable if word == "VLLM/bin/python" else word for word in command[2:]])
    assert args.json.parent == Path("benchmarks/results")
    table = [line.split(" | ") for line in text.splitlines() if line.startswith("| ") and "×" in line]
    over_bound = [float(row[-1].split()[0]) for row in table]
    assert over_bound == sorted(over_bound, reverse=True)
    assert len(table) == 10 and table[0][:4] == ["| 1", "plain", "341", "2.93"]
    # 332.2 MB of weights at one row, and 36 layers of 576 numbers for each of 192 tokens, over 3.35 TB/s.
    assert table[0][4] == f"{(332.2e6 + 192 * 36 * 576 * 2) / 3.35e9:.2f}"
