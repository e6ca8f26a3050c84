"""Steps that were recorded give the same again; what does not is said in words, and so is what is wrong with a file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mtpserve import LLM
from mtpserve.cli.main import main
from mtpserve.core.errors import ConfigError
from mtpserve.core.plan import StepPlan
from mtpserve.core.sampling import GrammarSpec, SamplingParams
from mtpserve.engine.startup.recording import MAGIC, Event, Header, Preamble, Recording, StepPlanned, StepRaised, StepRead
from mtpserve.tools.replay.replay import run
from tests.models.checkpoints import mimo

OPTIONS: dict[str, Any] = {"speculative_algorithm": "MTP+NGRAM", "max_total_tokens": 1024, "max_running_requests": 4, "device": "cpu"}
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}


def record(path: Path, fault: Callable[[LLM], None] = lambda llm: None) -> list[list[int]]:
    """→ the texts. Greedy, drawn, with a grammar, with rules, and from a prompt that is scored."""
    params = [
        SamplingParams(max_tokens=12, temperature=0, prompt_logprobs=1, logprobs=2),
        SamplingParams(max_tokens=12, temperature=0.9),
        SamplingParams(max_tokens=24, temperature=0.9, grammar=GrammarSpec("json_schema", json.dumps(SCHEMA))),
        SamplingParams(max_tokens=12, temperature=0.5, repetition_penalty=1.2, min_tokens=4, bad_words=("the",)),
    ]
    with LLM("demo", record_steps=str(path), **OPTIONS) as llm:
        fault(llm)
        return [each.tokens for each in llm.generate(["# a", "# b", "value = ", "def f("], params)]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("steps") / "steps"
    record(path)
    return path


def parts(path: Path) -> tuple[Preamble, Header, list[Event]]:
    recording = Recording(path)
    return recording.head, recording.header, list(recording.events())


def write(path: Path, *given: Any) -> None:
    frames = [msgspec.msgpack.encode(each) for each in given]
    path.write_bytes(MAGIC + b"".join(len(frame).to_bytes(4, "big") + frame for frame in frames))


def replayed(path: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str, str]:
    code = main(["replay", str(path), *options])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_a_recording_gives_the_same_again(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head, header, events = parts(recorded)
    planned = [event for event in events if isinstance(event, StepPlanned)]
    assert head.format == 4 and (header.pages, header.page_size, header.seats) == (64, 16, 4) and header.dtype in ("float32", "bfloat16")
    assert [event.step for event in planned] == list(range(1, len(planned) + 1)) and len(events) == 2 * len(planned)
    assert all(len(msgspec.msgpack.encode(event)) < 200 for event in planned if not event.plan.new_requests)
    code, out, err = replayed(recorded, capsys)
    assert (code, err) == (0, "") and out.endswith("every result is the same\n")
    assert out.startswith(f"replayed {len(planned)} steps, 4 requests, ") and header.model in out


def test_the_first_difference_is_named(recorded: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    head, header, events = parts(recorded)
    at = next(i for i, event in enumerate(events) if isinstance(event, StepRead) and event.step == 4)
    read = events[at]
    assert isinstance(read, StepRead)
    span = read.result.spans[1]
    flipped = msgspec.structs.replace(span, tokens=[(span.tokens[0] + 1) % 2048, *span.tokens[1:]])
    read.result.spans[1] = flipped
    write(tmp_path / "steps", head, header, *events)
    code, out, _ = replayed(tmp_path / "steps", capsys)
    plan = next(event.plan for event in events if isinstance(event, StepPlanned) and event.step == 4)
    assert code == 1 and out.startswith("replayed 4 steps")
    where = f"first difference: step 4, request offline-1 in seat {plan.spans[1].req_idx}: "
    assert out.endswith(f"{where}tokens were {flipped.tokens} when it was recorded, and are {span.tokens} now\n")


def test_what_was_written_before_a_crash_is_replayed(recorded: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    cut = tmp_path / "cut"
    cut.write_bytes(recorded.read_bytes()[:-7])
    code, out, _ = replayed(cut, capsys)
    assert code == 0 and "the file ends in the middle of a step: what comes before was replayed\n" in out
    assert "1 of the steps had not been read when the recording ended\n" in out


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data, rest: None, "No such file or directory"),
        (lambda data, rest: b"PK\x03\x04" + data, "was not written by --record-steps"),
        (lambda data, rest: MAGIC, "ends before the first step"),
        (lambda data, rest: data[: len(MAGIC) + 300], "ends before the first step"),
        (lambda data, rest: data.replace(b"StepPlanned", b"StepPlanmed", 1), "is damaged at byte "),
        (lambda data, rest: rest(Preamble(5, "9.1")), "was written by mtpserve 9.1 in format 5; mtpserve "),
    ],
    ids=["missing", "foreign", "empty", "header", "damaged", "newer"],
)  # fmt: skip
def test_a_file_that_is_no_recording_is_one_line(
    recorded: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, damage: Callable[..., bytes | None], message: str
) -> None:
    _, header, events = parts(recorded)

    def rest(changed: Preamble) -> bytes:
        write(tmp_path / "newer", changed, header, *events)
        return (tmp_path / "newer").read_bytes()

    data = damage(recorded.read_bytes(), rest)
    if data is not None:
        (tmp_path / "bad").write_bytes(data)
    code, _, err = replayed(tmp_path / "bad", capsys)
    assert code == 1 and message in err and err.count("\n") == 1 and err.startswith(f"mtpserve: {tmp_path / 'bad'}: ")


def test_another_model_is_refused(recorded: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    other = tmp_path / "other"
    mimo(other)
    code, _, err = replayed(recorded, capsys, "--model", str(other))
    assert code == 1 and err.count("\n") == 1
    assert err.startswith(f"mtpserve: {other}: is mimo with ") and "the steps were recorded with " in err


def unwell(runner: Any, kind: type[Exception] = RuntimeError) -> None:
    """The third step raises."""
    launch, count = runner.launch, 0

    def launched(plan: StepPlan) -> Any:
        nonlocal count
        count += 1
        if count == 3:
            raise kind("the device is unwell")
        return launch(plan)

    runner.launch = launched


def test_steps_that_raised_are_recorded(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    record(tmp_path / "steps", lambda llm: unwell(llm.engine.runner.runner))  # type: ignore[attr-defined]
    _, _, events = parts(tmp_path / "steps")
    assert [event for event in events if isinstance(event, StepRaised)] == [
        StepRaised(3, "launched", "RuntimeError", "the device is unwell")
    ]
    code, out, _ = replayed(tmp_path / "steps", capsys)
    what = "step 3 raised RuntimeError (the device is unwell) when it was recorded, and gives a result now"
    assert code == 1 and out.endswith(f"first difference: {what}\n")
    for kind, difference in ((RuntimeError, ""), (ValueError, "step 3 raised RuntimeError when it was recorded, and raises ValueError")):
        with LLM("demo", **OPTIONS) as llm:
            unwell(llm.engine.runner, kind)
            again = run(Recording(tmp_path / "steps"), llm.engine.runner)
        found = again.difference or ""
        assert again.raised == 1 and found.startswith(difference) and bool(found) == bool(difference)


def test_a_file_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--record-steps .*: No such file or directory"):
        LLM("demo", record_steps=str(tmp_path / "nowhere" / "steps"), **OPTIONS)


def test_without_the_option_nothing_is_between_engine_and_runner() -> None:
    with LLM("demo", **OPTIONS) as llm:
        assert type(llm.engine.runner).__name__ == "Runner"
