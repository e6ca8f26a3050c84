"""Control tokens in a client's messages are encoded as text, not as control tokens. The template itself is
rendered by tokenizer.py.

A rendered conversation is one text, in which a client's "<|im_end|>" looks like the template's own and would
end a turn. So before the template runs, each control token in the client's text is replaced by a mark: one
private character that the text does not contain. After rendering, the marks show which control tokens came
from the client. Most conversations contain none and are not changed.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from tokenizers import AddedToken, Tokenizer as FastTokenizer

from mtpserve.core.errors import InvalidRequest

BARS = re.compile(
    r"<[|｜].*[|｜]>", re.DOTALL
)  # DeepSeek's turns, <｜User｜>, are not special to its tokenizer
# Always control tokens: they end no turn, and clients send answers back with their reasoning, in which
# templates look for them.
REASONING_TAGS = frozenset({"<think>", "</think>"})
# Unicode's private characters but for those of fonts
MARKS = (*range(0xF0000, 0xFFFFE), *range(0x100000, 0x10FFFE))


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A rendered template, with marks. `spellings`: each mark's code point → the control token that it
    replaces."""

    marked: str
    spellings: Mapping[int, str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        return self.marked.translate(self.spellings) if self.spellings else self.marked


class ControlTokens:
    """The control tokens of one tokenizer: its special tokens, and all others in bars (`<|…|>`)."""

    def __init__(self, fast: FastTokenizer) -> None:
        self._fast = fast
        added = fast.get_added_tokens_decoder().items()
        control = {
            token.content: (id, token)
            for id, token in added
            if token.special or BARS.fullmatch(token.content)
        }
        # The longest first: one may be a part of another.
        self._tokens: dict[str, tuple[int, AddedToken]] = {
            text: control[text] for text in sorted(control, key=len, reverse=True)
        }
        # tokens by their first 3 characters; DeepSeek has 800 tokens and few beginnings
        self._beginnings: dict[str, list[str]] = {}
        for text in self._tokens:
            self._beginnings.setdefault(text[:3], []).append(text)

    def spelled_in(self, text: str) -> list[str]:
        """The control tokens that occur in `text`, the longest first."""
        present = {
            token
            for beginning, tokens in self._beginnings.items()
            if beginning in text
            for token in tokens
            if token in text
        }
        return [token for token in self._tokens if token in present] if present else []

    def marks(self, data: Any) -> dict[str, str]:
        """Control token → mark, for each control token in the strings of `data` (JSON of any depth); the
        marks do not occur there."""
        text = "\0".join(strings(data))
        tokens = [token for token in self.spelled_in(text) if token not in REASONING_TAGS]
        used = set(text) if tokens else set()
        free = (chr(point) for point in MARKS if chr(point) not in used)
        marks = dict(zip(tokens, free, strict=False))
        if len(marks) < len(tokens):
            raise InvalidRequest(
                "messages: too many private-use characters in a text that contains control tokens", "messages"
            )
        return marks

    def encode(self, chat: RenderedChat, *, special: bool) -> list[int]:
        """The token ids of a chat with marks. `special` adds what the model expects around a prompt."""
        twin, words, ids = self._twin
        text = chat.marked
        for token in self.spelled_in(text):
            text = text.replace(token, words[token])
        encoded = twin.encode(text.translate(chat.spellings), add_special_tokens=special)
        of_text = {
            id for id, around in zip(encoded.ids, encoded.special_tokens_mask, strict=True) if not around
        }
        # in some vocabularies the ordinary text encodes to the control token's id
        if forged := of_text & set(ids.values()):
            spelling = self._fast.id_to_token(min(forged))
            raise InvalidRequest(
                f"messages: {spelling!r} is a control token of this model, and cannot be written as text",
                "messages",
            )
        return [ids.get(id, id) for id in encoded.ids]

    @cached_property
    def _twin(self) -> tuple[FastTokenizer, dict[str, str], dict[int, int]]:
        """(tokenizer, words, ids): a copy of the tokenizer that encodes control tokens as text and has random
        words instead of them, which no client can guess; control token → its word; the word's id in the copy
        → the control token's id in the original."""
        twin = FastTokenizer.from_str(self._fast.to_str())
        secret = secrets.token_hex(16)
        words = {token: f"<{secret}-{id}>" for token, (id, _) in self._tokens.items()}
        twin.add_special_tokens(
            [
                like(entry, token, special=True)
                for token, (_, entry) in self._tokens.items()
                if not entry.special
            ]
        )
        twin.encode_special_tokens = True
        twin.add_tokens(
            [like(entry, words[token], special=False) for token, (_, entry) in self._tokens.items()]
        )
        words_there: dict[str, int] = twin.get_vocab()
        return twin, words, {words_there[words[token]]: id for token, (id, _) in self._tokens.items()}


def like(token: AddedToken, text: str, *, special: bool) -> AddedToken:
    return AddedToken(
        text,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=special,
    )


def strings(data: Any) -> Iterator[str]:
    if isinstance(data, str):
        yield data
    elif isinstance(data, Mapping):
        for name, value in data.items():
            yield from strings(name)
            yield from strings(value)
    elif isinstance(data, list):
        for value in data:
            yield from strings(value)


def marked(data: Any, marks: Mapping[str, str]) -> Any:
    """A copy of `data` with marks in place of the control tokens."""
    if isinstance(data, str):
        for spelling, mark in marks.items():
            data = data.replace(spelling, mark)
        return data
    if isinstance(data, Mapping):
        return {marked(name, marks): marked(value, marks) for name, value in data.items()}
    return [marked(value, marks) for value in data] if isinstance(data, list) else data
