"""Conversations and their times: from files in Mooncake's and ShareGPT's formats, and random ones.

    Mooncake    {"timestamp": ms, "input_length": n, "output_length": m, "hash_ids": [...]}, one object per
                line; an id stands for 512 tokens together with all before them
                (https://github.com/kvcache-ai/Mooncake). Generated tokens have no ids, so nobody finds them
                here: where a service's next turn does, its hit rate is higher.
    ShareGPT    [{"conversations": [{"from": "human", "value": text}, {"from": "gpt", "value": text}, …]}, …];
                it has no times.

Where there is no tokenizer, four characters are one token.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from random import Random
from typing import Any
from zlib import crc32

from mtpserve.core.errors import ConfigError

Encode = Callable[[str], Sequence[int]]
BLOCK = 512  # tokens of one of Mooncake's ids
MOST_IDS, MOST_ANSWERS = 1 << 22, 1 << 19  # tokens are 32-bit numbers
PEOPLE, MODELS = ("human", "user", "system"), ("gpt", "chatgpt", "assistant", "bing", "bard")
LENGTHS = ("timestamp", "input_length", "output_length")


@dataclass(frozen=True, slots=True)
class TraceTurn:
    """`new_tokens` and `answer` are made when they are read: a trace may have more tokens than memory."""

    new_tokens: Iterable[int]  # what the prompt has after the conversation so far
    answer: Sequence[int]  # what the model will say
    pause: float = 0.0  # seconds between the end of the turn before it and its arrival
    patience: float | None = None  # seconds after which the client leaves; None: it stays
    copies: int = 1  # choices: requests with this prompt, of which the first goes on
    # tokens beyond the answer's that the client would take; then the answer ends with a stop token
    more: int = 0


@dataclass(frozen=True, slots=True)
class TraceConversation:
    at: float  # seconds
    turns: Sequence[TraceTurn]
    salt: str = ""
    priority: int = 0


def read_trace(file: str, *, rate: float, pause: float = 0.0, slowdown: float = 1.0, limit: int | None = None,
    encode: Encode | None = None,
               seed: int = 0) -> list[TraceConversation]:  # fmt: skip
    """Returns the conversations in the order of arrival. `rate`: conversations per second, and `pause`:
    seconds before each further turn, where the file has no times; `slowdown`: a factor for the file's times.
    `limit`: conversations that are read. Raises ConfigError with the file and the line."""
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--trace {file}: {getattr(error, 'strerror', None) or error}") from error
    if text.lstrip().startswith("["):
        conversations = list(_sharegpt(file, text, rate, pause, limit, encode or pieces, Random(seed)))
    else:
        conversations = list(_mooncake(file, text, slowdown, limit))
    if not conversations:
        raise ConfigError(f"--trace {file}: no request in it")
    return sorted(conversations, key=lambda conversation: conversation.at)


def pieces(text: str) -> list[int]:
    """Tokens of four characters each: equal texts have equal ones."""
    return [crc32(text[i : i + 4].encode(errors="surrogatepass")) >> 1 for i in range(0, len(text), 4)]


@dataclass(frozen=True, slots=True)
class Blocks:
    """A prompt of Mooncake's: block i is the tokens 512 i …"""

    numbers: Sequence[int]
    length: int

    def __iter__(self) -> Iterator[int]:
        end = self.length - BLOCK * (len(self.numbers) - 1)
        for number in self.numbers[:-1]:
            yield from range(number * BLOCK, (number + 1) * BLOCK)
        yield from range(self.numbers[-1] * BLOCK, self.numbers[-1] * BLOCK + end)


def _mooncake(file: str, text: str, slowdown: float, limit: int | None) -> Iterator[TraceConversation]:
    numbers: dict[int, int] = {}  # ids may be large hashes
    others, num_read = count(), 0
    for line, entry in enumerate(text.splitlines(), 1):
        if not entry.strip():
            continue
        if num_read == limit:
            return
        num_read += 1
        time, length, output, ids = _entry(f"--trace {file}, line {line}", entry)
        blocks = [numbers.setdefault(hash_id, len(numbers)) for hash_id in ids]
        if len(numbers) > MOST_IDS:
            raise ConfigError(
                f"--trace {file}, line {line}: more than {MOST_IDS} different hash_ids: read less "
                f"of it by --num-prompts"
            )
        # Nothing else has these tokens: negative ones, of which each answer has its own.
        first = -(1 + next(others) % MOST_ANSWERS) * (1 << 12)
        yield TraceConversation(
            time / 1000 * slowdown, [TraceTurn(Blocks(blocks, length), range(first, first + output))]
        )


def _entry(where: str, entry: str) -> tuple[float, int, int, list[int]]:
    try:
        value = json.loads(entry)
    except ValueError as error:
        raise ConfigError(f"{where}: is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(
            f"{where}: must be an object with {', '.join(LENGTHS)} and hash_ids, got {type(value).__name__}"
        )
    for name in LENGTHS:
        least = 0 if name == "timestamp" else 1
        if (
            type(value.get(name)) not in ((int, float) if name == "timestamp" else (int,))
            or not least <= value[name] < 1 << 40
        ):
            raise ConfigError(
                f"{where}: {name} must be a number of at least {least}, got {value.get(name)!r}"
            )
    ids, length = value.get("hash_ids"), value["input_length"]
    if not isinstance(ids, list) or not all(type(hash_id) is int for hash_id in ids):
        raise ConfigError(f"{where}: hash_ids must be a list of whole numbers")
    if len(ids) != -(-length // BLOCK):
        raise ConfigError(
            f"{where}: hash_ids must have {-(-length // BLOCK)} ids for {length} tokens of input, "
            f"got {len(ids)}"
        )
    return value["timestamp"], length, value["output_length"], ids


def _sharegpt(file: str, text: str, rate: float, pause: float, limit: int | None, encode: Encode,
    random: Random
              ) -> Iterator[TraceConversation]:  # fmt: skip
    try:
        entries = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"--trace {file}, line {error.lineno}: is not JSON: {error.msg}") from error
    at = 0.0
    for number, entry in enumerate(entries[:limit], 1):
        turns = list(_turns(f"--trace {file}, conversation {number}", entry, pause, encode))
        if turns:  # some have no answer
            yield TraceConversation(at, turns)
            at += random.expovariate(rate)


def _turns(where: str, entry: Any, pause: float, encode: Encode) -> Iterator[TraceTurn]:
    messages = entry.get("conversations") if isinstance(entry, dict) else None
    if not isinstance(messages, list):
        raise ConfigError(f"{where}: must be an object with a list of 'conversations'")
    new_tokens: list[int] = []
    first = True
    for position, message in enumerate(messages, 1):
        who, text = (message.get("from"), message.get("value")) if isinstance(message, dict) else (None, None)
        if not isinstance(text, str) or who not in (*PEOPLE, *MODELS):
            allowed = f"'from', one of {', '.join((*PEOPLE, *MODELS))}, and 'value', a text"
            raise ConfigError(f"{where}, message {position}: must be an object with {allowed}")
        tokens = encode(text)
        if who in MODELS and new_tokens and tokens:
            yield TraceTurn(new_tokens, tokens, 0.0 if first else pause)
            new_tokens, first = [], False
        else:
            new_tokens = [*new_tokens, *tokens]


def random_trace(conversations: int, seed: int = 0, *, rate: float = 1.0, prompt: int = 64, output: int = 12,
    priorities: int = 1,
                 stop: int | None = None) -> Iterator[TraceConversation]:  # fmt: skip
    """Conversations of one to four turns, in the order of arrival: half begin with one of eight system
    prompts, some have a salt, some clients leave, some ask for several choices. `prompt` and `output`: mean
    lengths. `stop`: a token that ends texts early."""
    random, at, fresh = Random(seed), 0.0, count(1 << 20, 1 << 10)
    shared = [range(i << 10, (i << 10) + random.randint(1, 3 * prompt)) for i in range(8)]

    def length(mean: int) -> int:
        return 1 + min(int(random.expovariate(1 / mean)), 16 * mean, 1000)

    def tokens(number: int) -> range:
        first = next(fresh) % (1 << 30)
        return range(first, first + number)

    for _ in range(conversations):
        at += random.expovariate(rate)
        turns = []
        for turn in range(random.choice((1, 1, 1, 2, 2, 3, 4))):
            system = shared[int(8 * random.random() ** 2)] if turn == 0 and random.random() < 0.5 else ()
            ends = stop is not None and random.random() < 0.5
            answer = [*tokens(length(output)), *([stop] if ends and stop is not None else [])]
            turns.append(
                TraceTurn(
                    list(chain(system, tokens(length(prompt)))),
                    answer,
                    random.expovariate(rate / 8),
                    random.expovariate(rate / 16) if random.random() < 0.05 else None,
                    random.choice((2, 3, 5)) if random.random() < 0.05 else 1,
                    length(output) if ends else 0,
                )
            )
        yield TraceConversation(
            at, turns, random.choice(("", "", "", "a", "b")), random.randrange(priorities)
        )
