"""`mtpserve generate`, with an engine that says what the test wants."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from mtpserve.cli import generate
from mtpserve.core.errors import ConfigError
from mtpserve.core.request import Proposal
from mtpserve.core.sampling import SamplingParams
from mtpserve.text.outputs import StreamStep

STEPS = [
    StreamStep([5], Proposal(), 0, [], "def", [], None),
    StreamStep([6, 7, 8], Proposal([6, 7, 9], [0, 1, 2], ["mtp"] * 3, [1, 2]), 2, [" read", "_lines"], "(path)", [" no"], None),
    StreamStep([8], Proposal([1, 2, 3], [0, 1, 2], ["mtp"] * 3), 0, [], ":", ["a", "b", "c"], None),
]


class FakeLLM:
    made: ClassVar[dict[str, Any]] = {}
    asked: ClassVar[list[tuple[str, SamplingParams]]] = []

    def __init__(self, **options: Any) -> None:
        type(self).made = options

    def __enter__(self) -> FakeLLM:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def sampling(self, **values: Any) -> SamplingParams:
        return SamplingParams(**{"temperature": 0.6, **values})

    def stream(self, prompt: str, sampling: SamplingParams) -> Iterator[StreamStep]:
        type(self).asked = [(prompt, sampling)]
        yield from STEPS


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtpserve.llm.LLM", FakeLLM)


def test_the_text_goes_out_and_the_summary_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert generate.run(["--model", "demo", "prompt", "--temperature", "0", "--max-tokens", "5"]) == 0
    out, err = capsys.readouterr()
    assert out == "def read_lines(path):\n"
    assert err.startswith("5 tokens in ")
    assert err.endswith("6 drafted, 2 accepted (33%) · accept length 2.00\n")
    ((prompt, sampling),) = FakeLLM.asked
    assert (prompt, sampling.temperature, sampling.max_tokens) == ("prompt", 0, 5)


@pytest.mark.parametrize("options", [{}, {"speculative_num_steps": 0}, {"speculative_algorithm": "none"}])
def test_what_drafts_is_left_to_the_engine(options: dict[str, Any]) -> None:
    generate.run(["prompt", *(word for name, value in options.items() for word in (f"--{name}", str(value)))])
    assert FakeLLM.made == options


def test_the_models_recommendations_hold_where_nothing_is_said() -> None:
    generate.run(["prompt", "--top-p", "0.9"])
    assert FakeLLM.asked[0][1] == SamplingParams(max_tokens=generate.MAX_TOKENS, temperature=0.6, top_p=0.9)


def test_a_config_file_may_speak_of_the_server_too(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text("server: {port: 1}\npage-size: 32\nspeculative-algorithm: NEXTN\n", encoding="utf-8")
    generate.run(["prompt", "--config", str(file)])
    assert FakeLLM.made == {"page_size": 32, "speculative_algorithm": "NEXTN"}


def test_the_prompt_may_come_by_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("import os\n"))
    generate.run([])
    assert FakeLLM.asked[0][0] == "import os\n"


def test_without_a_prompt_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    with pytest.raises(ConfigError, match="prompt"):
        generate.run([])


def test_a_summary_of_plain_decoding() -> None:
    assert generate.Tally(tokens=4, seconds=2.0).line() == "4 tokens in 2.00 s, 2.0 tokens/s · nothing drafted"
