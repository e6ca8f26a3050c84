"""Datasets from files.

    sharegpt     [{"conversations": [{"from": "human", "value": text}, {"from": "gpt", "value": text}, …]}, …]
    custom       {"prompt": text, "output_tokens": n}, one object per line; output_tokens may be missing
    spec-bench   {"question_id": …, "category": text, "turns": [text, …]}, one object per line
                 (https://github.com/hemingkx/Spec-Bench)

Errors are ConfigErrors that name the file and the line or conversation.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

from mtpserve.core.errors import ConfigError
from mtpserve.tools.bench.dataset.asked import AskedConversation, AskedTurn, DatasetOptions
from mtpserve.tools.simulate.traces import MODELS, PEOPLE, pieces

Count = Callable[[str], Sequence[int]] | None
CUSTOM_OUTPUT = 256  # tokens of an answer where nothing says how many, as in vLLM's client
LEAST = 4  # tokens: shorter prompts and answers of ShareGPT's are left out, as in the peers' clients


def contents(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--dataset-path {file}: {getattr(error, 'strerror', None) or error}") from error


def objects(file: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the place and the object of each line that is not empty. Raises ConfigError."""
    for number, line in enumerate(contents(file).splitlines(), 1):
        where = f"--dataset-path {file}, line {number}"
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{where}: is not JSON: {error}") from error
        if not isinstance(value, dict):
            raise ConfigError(f"{where}: must be an object, got {type(value).__name__}")
        yield where, value


def text_of(where: str, name: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{where}: {name} must be a text, got {value!r}")
    return value


def custom(options: DatasetOptions, random: Random, count: Count) -> list[AskedConversation]:
    """Returns the conversations in the file's order. Raises ConfigError."""
    conversations = []
    for where, value in objects(options.dataset_path or ""):
        prompt, output = text_of(where, "prompt", value.get("prompt")), value.get("output_tokens")
        if options.custom_output_len is not None:
            output = options.custom_output_len
        elif output is not None and (type(output) is not int or output < 1):
            raise ConfigError(f"{where}: output_tokens must be a whole number of at least 1, got {output!r}")
        output = CUSTOM_OUTPUT if output is None else output
        category = value.get("category")
        conversations.append(
            AskedConversation((AskedTurn(prompt, output),), category if isinstance(category, str) else "")
        )
    return conversations


def spec_bench(options: DatasetOptions, random: Random, count: Count) -> list[AskedConversation]:
    """Returns all turns of each question, with the server's own answers between them, in the file's order."""
    conversations, categories = [], set()
    for where, value in objects(options.dataset_path or ""):
        turns, category = value.get("turns"), text_of(where, "category", value.get("category"))
        if not isinstance(turns, list) or not turns:
            raise ConfigError(f"{where}: turns must be a list of texts, got {turns!r}")
        categories.add(category)
        if options.spec_bench_category in (None, category):
            asked_turns = tuple(
                AskedTurn(text_of(where, "turns", turn), options.spec_bench_output_len) for turn in turns
            )
            conversations.append(AskedConversation(asked_turns, category))
    if not conversations and categories:
        wanted_category, category_names = options.spec_bench_category, ", ".join(sorted(categories))
        raise ConfigError(f"--spec-bench-category must be one of {category_names}, got {wanted_category!r}")
    return conversations


def shared_messages(file: str) -> Iterator[list[tuple[bool, str]]]:
    """Yields the messages of each conversation: whether a model wrote it, and its text. Raises
    ConfigError."""
    try:
        entries = json.loads(contents(file))
    except json.JSONDecodeError as error:
        raise ConfigError(f"--dataset-path {file}, line {error.lineno}: is not JSON: {error.msg}") from error
    if not isinstance(entries, list):
        raise ConfigError(
            f"--dataset-path {file}: must be a list of conversations, got {type(entries).__name__}"
        )
    for number, entry in enumerate(entries, 1):
        where = f"--dataset-path {file}, conversation {number}"
        messages = entry.get("conversations", entry.get("conversation")) if isinstance(entry, dict) else None
        if not isinstance(messages, list):
            raise ConfigError(f"{where}: must be an object with a list of 'conversations'")
        utterances = []
        for position, message in enumerate(messages, 1):
            who, text = (
                (message.get("from"), message.get("value")) if isinstance(message, dict) else (None, None)
            )
            if not isinstance(text, str) or who not in (*PEOPLE, *MODELS):
                allowed = f"'from', one of {', '.join((*PEOPLE, *MODELS))}, and 'value', a text"
                raise ConfigError(f"{where}, message {position}: must be an object with {allowed}")
            utterances.append((who in MODELS, text))
        yield utterances


def exchanges(utterances: Sequence[tuple[bool, str]]) -> Iterator[tuple[str, str]]:
    """What a person said and what the model answered; messages without an answer go together with the next
    one."""
    prompts: list[str] = []
    for by_model, text in utterances:
        if not by_model:
            prompts.append(text)
        elif prompts:
            yield "\n".join(prompts), text
            prompts = []


def shared_conversations(options: DatasetOptions, random: Random, count: Count) -> list[AskedConversation]:
    """Shuffled. An answer may be as long as the one in the file, unless --sharegpt-output-len says how long.
    A conversation ends before the turn that is longer than --sharegpt-context-len together with all before
    it."""
    encode = count or pieces
    conversations = []
    for utterances in shared_messages(options.dataset_path or ""):
        turns: list[AskedTurn] = []
        context = 0
        for prompt, answer in exchanges(utterances):
            before, num_answer_tokens = len(encode(prompt)), len(encode(answer))
            output = options.sharegpt_output_len or num_answer_tokens
            context += before + output
            too_short = before < LEAST or (options.sharegpt_output_len is None and num_answer_tokens < LEAST)
            if too_short or (
                options.sharegpt_context_len is not None and context > options.sharegpt_context_len
            ):
                break
            turns.append(AskedTurn(prompt, output))
        if turns:
            conversations.append(AskedConversation(tuple(turns)))
    random.shuffle(conversations)
    return conversations


def shared_prompts(options: DatasetOptions, random: Random, count: Count) -> list[AskedConversation]:
    """The first turn of each conversation."""
    return [
        AskedConversation(conversation.turns[:1])
        for conversation in shared_conversations(options, random, count)
    ]


def shared_texts(file: str, random: Random) -> list[str]:
    """All that was said, to take pieces from."""
    texts = ["\n".join(text for _, text in utterances) for utterances in shared_messages(file)]
    texts = [text for text in texts if text.strip()]
    if not texts:
        raise ConfigError(f"--dataset-path {file}: no text in it")
    random.shuffle(texts)
    return texts
