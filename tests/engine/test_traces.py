"""Traces in files: what they mean, and what is said of those that mean nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mtpserve.core.errors import ConfigError
from mtpserve.tools.simulate.traces import BLOCK, TraceConversation, pieces, read_trace
from tests.engine.simulate import simulate

MOONCAKE = [
    {"timestamp": 1000, "input_length": 1100, "output_length": 20, "hash_ids": [5, 7, 9]},
    {"timestamp": 0, "input_length": 600, "output_length": 30, "hash_ids": [5, 1 << 60]},
]
SHAREGPT = [
    {
        "id": "a",
        "conversations": [
            {"from": "human", "value": "What is a page?"},
            {"from": "gpt", "value": "Sixteen tokens."},
            {"from": "human", "value": "And two?"},
            {"from": "gpt", "value": "Thirty-two."},
        ],
    },
    {"conversations": [{"from": "system", "value": "Be brief."}, {"from": "user", "value": "Why?"}, {"from": "assistant", "value": "So."}]},
    {"conversations": [{"from": "gpt", "value": "Nobody asked."}]},
]


def written(folder: Path, entries: Any) -> str:
    """Lists of lines as they are, others as JSON."""
    file = folder / "trace"
    lines = isinstance(entries, list) and all(isinstance(entry, str) or "timestamp" in entry for entry in entries)
    text = "\n".join(entry if isinstance(entry, str) else json.dumps(entry) for entry in entries) if lines else json.dumps(entries)
    file.write_text(text)
    return str(file)


def prompts(trace: list[TraceConversation]) -> list[list[list[int]]]:
    return [[list(turn.new_tokens) for turn in each.turns] for each in trace]


def test_mooncakes_ids_are_blocks_of_tokens(tmp_path: Path) -> None:
    first, second = read_trace(written(tmp_path, MOONCAKE), rate=1, slowdown=2)
    assert (first.at, second.at) == (0, 2)
    [[one], [two]] = prompts([first, second])
    assert (len(one), len(two)) == (600, 1100) and one[:BLOCK] == two[:BLOCK] and not set(one[BLOCK:]) & set(two)
    assert len(set(two)) == 1100
    answers = [list(each.turns[0].answer) for each in (first, second)]
    assert [len(answer) for answer in answers] == [30, 20] and not set(answers[0]) & set(answers[1])


def test_a_mooncake_trace_through_the_cache(tmp_path: Path) -> None:
    result, _ = simulate(read_trace(written(tmp_path, MOONCAKE), rate=1))
    assert (result.finished, result.prompt_tokens, result.cached_tokens, result.output_tokens) == (2, 1700, BLOCK, 50)


def test_sharegpts_turns_follow_each_other(tmp_path: Path) -> None:
    one, two = read_trace(written(tmp_path, SHAREGPT), rate=0.5, pause=3.0, encode=lambda text: [ord(letter) for letter in text])
    assert one.at == 0 < two.at
    assert ["".join(map(chr, turn.new_tokens)) for turn in (*one.turns, *two.turns)] == ["What is a page?", "And two?", "Be brief.Why?"]
    assert ["".join(map(chr, turn.answer)) for turn in one.turns] == ["Sixteen tokens.", "Thirty-two."]
    assert [turn.pause for turn in one.turns] == [0.0, 3.0]


def test_without_a_tokenizer_four_characters_are_a_token(tmp_path: Path) -> None:
    [one, two] = read_trace(written(tmp_path, SHAREGPT), rate=1)
    assert [len(list(turn.new_tokens)) for turn in (*one.turns, *two.turns)] == [4, 2, 4] and pieces("abcdabcd")[0] == pieces("abcd")[0]
    result, _ = simulate([one, two], page_size=1)
    assert (result.requests, result.cached_tokens) == (3, 4 + 4 - 1)


def test_the_beginning_of_a_trace(tmp_path: Path) -> None:
    assert len(read_trace(written(tmp_path, MOONCAKE), rate=1, limit=1)) == 1
    assert len(read_trace(written(tmp_path, SHAREGPT), rate=1, limit=1)) == 1


@pytest.mark.parametrize(
    ("entries", "what"),
    [
        ([json.dumps(MOONCAKE[0]), "", "{"], "line 3: is not JSON: Expecting property name"),
        ([json.dumps(MOONCAKE[0]), "7"], "line 2: must be an object with timestamp, input_length, output_length and hash_ids, got int"),
        ([MOONCAKE[0] | {"input_length": 0}], "line 1: input_length must be a number of at least 1, got 0"),
        ([MOONCAKE[0] | {"output_length": True}], "line 1: output_length must be a number of at least 1, got True"),
        ([MOONCAKE[0] | {"timestamp": "1"}], "line 1: timestamp must be a number of at least 0, got '1'"),
        ([MOONCAKE[0] | {"hash_ids": ["x"]}], "line 1: hash_ids must be a list of whole numbers"),
        ([MOONCAKE[0] | {"hash_ids": [1]}], "line 1: hash_ids must have 3 ids for 1100 tokens of input, got 1"),
        (["", ""], "no request in it"),
        (["[", "{"], "line 2: is not JSON: Expecting property name"),
        ([{"conversations": 7}], "conversation 1: must be an object with a list of 'conversations'"),
        ([SHAREGPT[0], {"conversations": [{"from": "human"}]}], "conversation 2, message 1: must be an object with 'from', one of human"),
        ([{"conversations": [{"from": "tool", "value": "x"}]}], "conversation 1, message 1: must be an object with 'from', one of human"),
    ],
)
def test_errors_name_the_file_and_the_place(entries: Any, what: str, tmp_path: Path) -> None:
    file = written(tmp_path, entries)
    with pytest.raises(ConfigError) as error:
        read_trace(file, rate=1)
    assert str(error.value).startswith(f"--trace {file}") and what in str(error.value) and "\n" not in str(error.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_trace(str(tmp_path / "none"), rate=1)
