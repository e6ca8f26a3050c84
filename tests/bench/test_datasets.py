"""Each dataset: what is asked, how long it is by the tokenizer, and what is said of files that are wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest

from mtpserve.config import ModelConfig
from mtpserve.core.errors import ConfigError, LoadError
from mtpserve.tools.bench.dataset.asked import AskedTurn, DatasetOptions, Questions
from mtpserve.tools.bench.dataset.datasets import DATASETS, questions_of
from mtpserve.tools.bench.dataset.texts import TextMaker
from mtpserve.tools.bench.dataset.tokenizing import BenchTokenizer, tokenizer_at

SMALL = DatasetOptions(num_prompts=6, warm=2, random_input_len=40, random_output_len=8)
PARSE, WRITE, READER = "def parse(path):\n    return path\n", "def write(path, text):\n", "class Reader:\n    pass\n"


def conversation(*said: tuple[str, str]) -> dict[str, list[dict[str, str]]]:
    return {"conversations": [{"from": who, "value": text} for who, text in said]}


SHARED = [
    conversation(("human", PARSE), ("gpt", WRITE), ("human", READER), ("gpt", "import os, sys, json\n")),
    conversation(("system", "import os\n"), ("user", "for line in lines:\n"), ("assistant", "    print(line.strip())\n")),
    conversation(("gpt", "alone")),
    conversation(("human", "x"), ("gpt", "too short a question")),
]


@cache
def demo() -> BenchTokenizer:
    return BenchTokenizer("demo")


def ask(options: DatasetOptions, tokenizer: BenchTokenizer | None = None) -> Questions:
    return questions_of(options, tokenizer, 1000)


def turns(questions: Questions) -> list[AskedTurn]:
    return [turn for each in questions.measured for turn in each.turns]


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "shared.json"
    path.write_text(json.dumps(SHARED))
    return str(path)


def lines(tmp_path: Path, *values: object) -> str:
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(f"{value if isinstance(value, str) else json.dumps(value)}\n" for value in values) + "\n")
    return str(path)


def counts(questions: Questions, chat: bool = False) -> list[int]:
    return [demo().prompt_tokens(str(turn.prompt), chat) for turn in turns(questions)]


def test_random_prompts_have_the_tokens_that_were_meant() -> None:
    made = ask(replace(SMALL, num_prompts=30), demo())
    assert counts(made) == [40] * 30 == [turn.tokens for turn in turns(made)] and {turn.output for turn in turns(made)} == {8}
    assert len(made.warm) == 2 and len({turn.prompt for each in (*made.measured, *made.warm) for turn in each.turns}) == 32
    again = ask(replace(SMALL, num_prompts=30), demo())
    assert made == again != ask(replace(SMALL, num_prompts=30, seed=1), demo())


def test_texts_of_any_length() -> None:
    maker = TextMaker(demo(), Random(3))
    for tokens in (1, 2, 3, 17, 400):
        text, count = maker.exactly(tokens)
        assert maker.count(text) == count == tokens
    assert maker.exactly(50, "def f():\n")[0].startswith("def f():\n")
    # Nothing of the source may be left where there is no room.
    assert maker.exactly(1, "def f():\n", "x = 1") == ("def f():\n", maker.count("def f():\n"))


@pytest.mark.parametrize(("shrinks", "low", "high"), [(False, 20, 60), (True, 20, 40)])
def test_lengths_vary_as_each_peer_means_it(shrinks: bool, low: int, high: int) -> None:
    made = ask(replace(SMALL, num_prompts=60, random_range_ratio=0.5, shrinks=shrinks), demo())
    found = counts(made)
    assert found == [turn.tokens for turn in turns(made)]
    assert low <= min(found) < low + 8 and high - 8 < max(found) <= high and f"{low} to {high}" in made.notes[0]


def test_random_prompts_from_texts_and_with_a_prefix(file: str) -> None:
    made = ask(replace(SMALL, dataset_path=file, random_prefix_len=10), demo())
    assert counts(made) == [50] * 6 and len({str(turn.prompt)[:12] for turn in turns(made)}) == 1
    texts = "".join(message["value"] for each in SHARED for message in each["conversations"])
    assert any(str(turn.prompt)[-12:] in texts for turn in turns(made))


def test_chat_prompts_leave_room_for_the_template(tmp_path: Path) -> None:
    directory = ModelConfig().directory
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(directory / name, tmp_path)
    shutil.copy(directory / "comments.jinja", tmp_path / "chat_template.jinja")
    chats = BenchTokenizer(str(tmp_path))
    made = ask(replace(SMALL, chat=True), chats)
    lengths = [chats.prompt_tokens(str(turn.prompt), True) for turn in turns(made)]
    assert lengths == [40] * 6 == [turn.tokens for turn in turns(made)] != counts(made)


def test_random_ids_need_no_tokenizer() -> None:
    made = ask(replace(SMALL, dataset_name="random-ids"))
    prompts = [turn.prompt for turn in turns(made)]
    assert all(isinstance(prompt, tuple) and len(prompt) == 40 and 3 <= min(prompt) <= max(prompt) < 1000 for prompt in prompts)


def test_groups_share_their_system_prompt() -> None:
    options = DatasetOptions(
        dataset_name="generated-shared-prefix", gsp_num_groups=3, gsp_prompts_per_group=4, gsp_system_prompt_len=30, gsp_question_len=10
    )
    made = ask(options, demo())
    assert counts(made) == [40] * 12
    prompts = [str(turn.prompt) for turn in turns(made)]
    assert len(set(prompts)) == 12 and len({prompt.split("\n\n")[0] for prompt in prompts}) == 3
    assert made.warm[0].turns[0].prompt not in prompts


def test_generated_conversations() -> None:
    made = ask(replace(SMALL, dataset_name="multi-turn", multi_turn_num_turns=3), demo())
    assert made.requests == 18 and [len(each.turns) for each in made.measured] == [3] * 6
    first = made.measured[0].turns
    assert first[0].tokens == 40 and first[1].tokens is None and str(first[1].prompt).startswith("\n")


def test_sharegpt(file: str) -> None:
    made = ask(replace(SMALL, dataset_name="sharegpt", dataset_path=file, num_prompts=2), demo())
    by_prompt = {str(turn.prompt): turn.output for turn in turns(made)}
    assert by_prompt.keys() == {PARSE, "import os\n\nfor line in lines:\n"}
    assert by_prompt[PARSE] == len(demo().encode(WRITE))
    fixed = ask(replace(SMALL, dataset_name="sharegpt", dataset_path=file, sharegpt_output_len=7))
    assert {turn.output for turn in turns(fixed)} == {7} and "four characters" in fixed.notes[1]
    assert not any(turn.prompt == "x" for turn in turns(fixed))


def test_multi_turn_from_a_file(file: str) -> None:
    made = ask(replace(SMALL, dataset_name="multi-turn", dataset_path=file), demo())
    assert sorted(len(each.turns) for each in made.measured) == [1, 2]
    short = ask(replace(SMALL, dataset_name="multi-turn", dataset_path=file, sharegpt_context_len=30), demo())
    assert [len(each.turns) for each in short.measured] == [1, 1], "the second turn does not fit"


def test_custom(tmp_path: Path) -> None:
    path = lines(tmp_path, {"prompt": "a", "output_tokens": 3}, {"prompt": "b", "category": "c"})
    made = ask(replace(SMALL, dataset_name="custom", dataset_path=path))
    assert turns(made) == [AskedTurn("a", 3), AskedTurn("b", 256)] and [each.category for each in made.measured] == ["", "c"]
    assert "2 of the 6" in made.notes[1] and "--flush-cache" in made.notes[2]
    assert [turn.output for turn in turns(ask(replace(SMALL, dataset_name="custom", dataset_path=path, custom_output_len=9)))] == [9, 9]
    none = ask(replace(SMALL, dataset_name="custom", dataset_path=path, num_prompts=1, warm=1))
    assert none.warm[0].turns[0].prompt == "b" and len(none.notes) == 1


def test_spec_bench(tmp_path: Path) -> None:
    path = lines(
        tmp_path, {"question_id": 1, "category": "qa", "turns": ["a", "b"]}, {"question_id": 2, "category": "math", "turns": ["c"]}
    )
    options = replace(SMALL, dataset_name="spec-bench", dataset_path=path, spec_bench_output_len=5)
    made = ask(options)
    assert [(each.category, len(each.turns)) for each in made.measured] == [("qa", 2), ("math", 1)] and turns(made)[0] == AskedTurn("a", 5)
    assert [each.category for each in ask(replace(options, spec_bench_category="math")).measured] == ["math"]
    with pytest.raises(ConfigError, match="--spec-bench-category must be one of math, qa, got 'none'"):
        ask(replace(options, spec_bench_category="none"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("custom", "{", "line 1: is not JSON"),
        ("custom", "[]", "line 1: must be an object, got list"),
        ("custom", '{"prompt": 3}', "line 1: prompt must be a text, got 3"),
        ("custom", '{"prompt": "a", "output_tokens": 0}', "output_tokens must be a whole number of at least 1, got 0"),
        ("custom", "", "nothing in it can be asked"),
        ("spec-bench", '{"category": "a", "turns": []}', "turns must be a list of texts"),
        ("spec-bench", '{"turns": ["a"]}', "category must be a text, got None"),
        ("sharegpt", "{}", "must be a list of conversations, got dict"),
        ("sharegpt", "[\n3\n", "line 3: is not JSON"),
        ("sharegpt", '[{"a": 1}]', "conversation 1: must be an object with a list of 'conversations'"),
        ("sharegpt", '[{"conversations": [{"from": "cat", "value": ""}]}]', "conversation 1, message 1: must be an object with 'from'"),
        ("random", "[]", "no text in it"),
    ],
)
def test_files_that_are_wrong(tmp_path: Path, name: str, content: str, message: str) -> None:
    path = tmp_path / "file"
    path.write_text(content)
    with pytest.raises(ConfigError) as error:
        ask(replace(SMALL, dataset_name=name, dataset_path=str(path)), demo())
    assert message in str(error.value) and str(path) in str(error.value)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"dataset_name": "none"}, "--dataset-name must be one of random, random-ids"),
        ({"dataset_name": "random"}, "--dataset-name random needs the model's tokenizer"),
        ({"dataset_name": "custom"}, "--dataset-name custom needs --dataset-path FILE"),
        ({"dataset_name": "custom", "dataset_path": "/none"}, "--dataset-path /none: No such file"),
        ({"dataset_name": "random-ids", "chat": True}, "which chat completions do not take"),
        ({"dataset_name": "random-ids", "random_range_ratio": 1.0}, "--random-range-ratio must be in [0, 1), as vLLM means it"),
        ({"dataset_name": "random-ids", "random_range_ratio": 1.5, "shrinks": True}, "--random-range-ratio must be in [0, 1], got 1.5"),
    ],
)
def test_options_that_are_wrong(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        ask(replace(SMALL, **changed))
    assert message in str(error.value)


def test_every_dataset_is_here() -> None:
    assert set(DATASETS) == {"random", "random-ids", "sharegpt", "custom", "spec-bench", "generated-shared-prefix", "multi-turn"}


def test_the_tokenizer_is_the_one_at_hand(tmp_path: Path) -> None:
    assert tokenizer_at(None, "demo", None) is not None and tokenizer_at(None, "other", str(tmp_path)) is None
    with pytest.raises(LoadError):
        tokenizer_at(str(tmp_path), "demo", None)


class WordTokenizer:
    """Whose tokens have no blanks, one for a word."""

    size = 40

    def token_text(self, token: int) -> str | None:
        return f"w{token}" if token > 2 else None

    def prompt_tokens(self, text: str, chat: bool) -> int:
        return 1 + len(self.encode(text))

    def encode(self, text: str) -> Sequence[int]:
        return [int(word.removeprefix("w")) for word in text.split()]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(f" w{token}" for token in ids)


def test_tokenizers_without_blanks_in_their_tokens() -> None:
    maker = TextMaker(WordTokenizer(), Random(0))
    text, count = maker.exactly(12)
    assert len(text.split()) == 11 and count == 12
