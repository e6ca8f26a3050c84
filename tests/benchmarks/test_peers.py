"""The benchmarks against other engines, without these: what they report, how they fail, and how the others are asked."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
MISTRALRS = """
from types import SimpleNamespace as Of
class ModelDType:
    Auto, F32, BF16, F16 = range(4)
class Which:
    Plain = Of
def ChatCompletionRequest(**fields):
    return Of(**fields)
class Runner:
    def __init__(self, which, mtp_model=None, **options):
        if mtp_model is not None:
            raise ValueError("no drafts here\\nand a stack")
    def send_chat_completion_request(self, asked):
        prompt = asked.messages[0]["content"]
        if prompt == "bad":
            raise ValueError("this prompt is bad")
        for i in range(asked.max_tokens):
            usage = Of(completion_tokens=i + 1, prompt_tokens=len(prompt)) if i + 1 == asked.max_tokens else None
            yield Of(choices=[Of(delta=Of(content=f"{i} "))], usage=usage)
"""


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def row(engine: str, mode: str, tokens_per_s: float, model: str = "small", many: int = 4, spread: float = 1.0) -> dict[str, Any]:
    server = engine if engine == "mtpserve" else f"{engine} float32"
    numbers = {"tokens_per_s": tokens_per_s, "least_tokens_per_s": tokens_per_s - spread, "most_tokens_per_s": tokens_per_s + spread}
    return {"model": model, "mode": mode, "concurrency": many, "server": server, "engine": engine} | numbers


MEDIANS = [
    row("mtpserve", "plain", 100.0), row("vllm", "plain", 101.0), row("vllm", "plain", 90.0), row("mistral.rs", "plain", 50.0),
    row("mtpserve", "mtp", 80.0), row("vllm", "mtp", 40.0), row("mtpserve", "plain", 10.0, "258m"), row("vllm", "plain", 20.0, "258m"),
]  # fmt: skip


def test_each_lost_cell_has_a_sentence_and_a_key_for_its_reason() -> None:
    from peers.losses import losses, unused

    reasons = {"vllm/plain/4": "its rows are packed.", "258m/vllm/plain/4": "the cache is cold", "vllm/mtp/64": "no such cell"}
    found = losses(MEDIANS, reasons)
    assert [each["key"] for each in found] == ["small/vllm/plain/4", "small/vllm/plain:mtp/4", "258m/vllm/plain/4"]
    assert found[0]["sentence"] == (
        "At 4 requests with 6.4 M parameters, vLLM without drafts gives 1.01 × mtpserve's tokens per second without drafts "
        "(101.0 against 100.0; the ranges of the rounds overlap), because its rows are packed."
    )
    assert found[1]["sentence"].endswith("gives 1.26 × mtpserve's tokens per second with drafts (101.0 against 80.0).")
    assert found[1]["reason"] is None
    assert found[2]["sentence"].endswith("because the cache is cold.")
    assert unused(found, reasons) == ["vllm/mtp/64"]


def test_reasons_are_added_to_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from peers import losses

    result, reasons = tmp_path / "peers.json", tmp_path / "reasons.json"
    result.write_text(json.dumps({"commit": "abc", "numbers": {"medians": MEDIANS, "losses": []}}))
    reasons.write_text(json.dumps({"vllm/plain/4": "of that"}))
    monkeypatch.setattr("sys.argv", ["losses.py", str(result), "--reasons", str(reasons)])
    losses.main()
    assert [each["reason"] for each in json.loads(result.read_text())["numbers"]["losses"]] == ["of that", None, "of that"]
    assert "without a reason: small/vllm/plain:mtp/4" in capsys.readouterr().out
    for content, said in (("{", "not valid JSON"), ("[1]", "object of texts"), ('{"a": 1}', "object of texts")):
        reasons.write_text(content)
        with pytest.raises(SystemExit, match=said):
            losses.reasons_in(reasons)
    with pytest.raises(SystemExit, match="No such file"):
        losses.reasons_in(tmp_path / "other.json")
    old = ROOT / "benchmarks" / "results" / "peers_small_zen3_2core.json"
    monkeypatch.setattr("sys.argv", ["losses.py", str(old)])
    with pytest.raises(SystemExit, match="is not a result of"):
        losses.main()


def test_the_readmes_table_has_every_engine_and_what_was_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import report
    from peers.losses import losses

    numbers = {
        "medians": MEDIANS,
        "losses": losses(MEDIANS, {}),
        "skipped": [{"skipped": "it has no drafts"}],
        "peers": {"vllm": {"vllm": "0.3"}},
    }
    whole = {"command": "python x.py", "commit": "abc", "device": "a chip", "cores": 2, "numbers": numbers}
    (tmp_path / "peers_new_zen5_2core.json").write_text(json.dumps(whole))
    (tmp_path / "peers_other.json").write_text(json.dumps(whole))
    (tmp_path / "peers_old.json").write_text(json.dumps({"numbers": {"medians": []}}))
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    table, notes = report.against_vllm().split("\n\n", 1)
    assert table.splitlines()[:8] == [
        "| mtpserve's tokens per second over | | on | 4 |",
        "|---|---|---|---|",
        "| 6.4 M, plain | vLLM | Zen 5 | **0.99 ×** |",
        "| 6.4 M, plain | mistral.rs | Zen 5 | 2.0 × |",
        "| 6.4 M, three drafts | vLLM | Zen 5 | 2.0 × |",
        "| 6.4 M, three drafts | vLLM, plain | Zen 5 | **0.79 ×** |",
        "| 6.4 M, three drafts | mistral.rs, plain | Zen 5 | 1.6 × |",
        "| 258 M, plain | vLLM | Zen 5 | **0.50 ×** |",
    ]
    assert table.splitlines()[8] == "| 6.4 M, plain | vLLM | a chip | **0.99 ×** |", "of a file that names no chip"
    assert "`python x.py` (2 cores of a chip, abc; vLLM 0.3; [file](../benchmarks/results/peers_new_zen5_2core.json))" in notes
    assert "- At 4 requests with 258 M parameters, vLLM without drafts gives 2.00 ×" in notes
    assert notes.endswith("Not measured:\n\n- it has no drafts\n")


def test_two_load_generators_are_compared_by_the_rounds_spread() -> None:
    from peers.bench_serve import FIGURES, comparison

    def seen(tool: str, number: int, value: float) -> dict[str, Any]:
        return {"tool": tool, "case": "request-rate 4", "round": number} | dict.fromkeys(FIGURES, value)

    near = [seen("vllm", 0, 10.0), seen("vllm", 1, 12.0), seen("mtpserve", 0, 12.9), seen("mtpserve", 1, 13.0)]
    found = comparison(near, "plain")
    assert [row.figure for row in found] == list(FIGURES)
    assert all(row.within_spread for row in found)
    assert (found[0].vllm, found[0].vllm_least, found[0].vllm_most) == (11.0, 10.0, 12.0)
    assert found[0].difference == pytest.approx(12.95 / 11 - 1)
    far = [seen("vllm", 0, 10.0), seen("vllm", 1, 11.0), seen("mtpserve", 0, 12.0), seen("mtpserve", 1, 12.0)]
    judged = {row.figure: row.within_spread for row in comparison(far, "mtp")}
    assert judged["mean_ttft_ms"] is False
    assert judged["mean_itl_ms"] is None, "with drafts the two programs mean different things"


def test_an_engine_that_does_not_start_says_why(tmp_path: Path) -> None:
    from peers.checkpoints import Prompt
    from peers.running import DidNotStart, started
    from peers.servers import Server, versions

    program = "print('starting'); raise ValueError('this layout is unknown')"
    server = Server("engine", "engine", [sys.executable, "-c", program], [])
    with pytest.raises(DidNotStart) as failed, started(server, tmp_path, "plain", Prompt([1], "a")):
        pass
    assert failed.value.said == "did not start: ValueError: this layout is unknown"
    assert "starting" in str(failed.value), "the log's end"
    with pytest.raises(SystemExit, match="no program of a virtual environment"):
        versions(tmp_path / "python")
    with pytest.raises(SystemExit, match="the package mistralrs is not installed"):
        versions(Path(sys.executable), "mistral.rs")


def test_mistral_rs_is_asked_in_its_own_process(tmp_path: Path) -> None:
    from peers.checkpoints import Prompt
    from peers.running import DidNotStart, started
    from peers.servers import WORKER, MistralRs

    (tmp_path / "mistralrs.py").write_text(MISTRALRS)
    model = made_checkpoint(tmp_path / "model")
    server = MistralRs("mistral.rs auto", "mistral.rs", [sys.executable, str(WORKER)], ["--seats", "2"], {"PYTHONPATH": str(tmp_path)})
    prompts = [Prompt([1] * length, "x" * length) for length in (1, 2, 3, 4, 5)]
    with started(server, model, "plain", prompts[0], tmp_path / "views") as running:
        answer = running.load(prompts, 3, 2)
        with pytest.raises(SystemExit, match="a prompt was 5 tokens to it, not 1"):
            running.load([Prompt([1], "x" * 5)], 3, 1)
        with pytest.raises(SystemExit, match="this prompt is bad"):
            running.load([Prompt([1], "bad")], 3, 1)
        assert running.counters() == {"drafts": 0.0, "accepted": 0.0}
    assert [request["text"] for request in answer["requests"]] == ["0 1 2 "] * 5
    assert all(request["sent"] <= request["arrivals"][0] <= request["end"] for request in answer["requests"])
    with pytest.raises(DidNotStart, match="no drafts here") as failed, started(server, model, "mtp", prompts[0], tmp_path / "views"):
        pass
    assert failed.value.said == "did not start: no drafts here"


def made_checkpoint(folder: Path) -> Path:
    folder.mkdir()
    config = {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "hidden_size": 8, "eos_token_id": 3}
    for name, content in {"config.json": config, "tokenizer.json": {}, "generation_config.json": {"eos_token_id": 3}}.items():
        (folder / name).write_text(json.dumps(content))
    return folder


def test_engines_without_mimo_get_the_same_files_under_qwen2s_config(tmp_path: Path) -> None:
    from peers.checkpoints import view

    model = made_checkpoint(tmp_path / "model")
    made = view(model, tmp_path / "views")
    assert view(model, tmp_path / "views") == made, "it may be there already"
    config = json.loads((made / "config.json").read_text())
    assert (config["architectures"], config["model_type"], config["hidden_size"]) == (["Qwen2ForCausalLM"], "qwen2", 8)
    assert config["eos_token_id"] is None
    assert (made / "tokenizer.json").resolve() == model / "tokenizer.json"
    assert not (made / "generation_config.json").exists(), "it has an end token too"
