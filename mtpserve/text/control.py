"""Control tokens that a client spells in a conversation stay text. Which template is rendered, and how, is the tokenizer's.

A rendered conversation is one text, in which a client's "<|im_end|>" looks like the template's own and would end a turn. So before the
template runs, each such spelling in what the client wrote becomes a mark: one private character that stands nowhere else in it. Behind
the template the marks tell the client's spellings from the template's. Most conversations hold none, and nothing happens to those.
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

BARS = re.compile(r"<[|｜].*[|｜]>", re.DOTALL)  # DeepSeek's turns, <｜User｜>, are not special to its tokenizer
# Of no turn, and tokens whoever writes them: clients send answers back with their reasoning, in which templates look for these.
REASONING_TAGS = frozenset({"<think>", "</think>"})
MARKS = (*range(0xF0000, 0xFFFFE), *range(0x100000, 0x10FFFE))  # Unicode's private characters but for those of fonts


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """What a template wrote, with marks; `spellings` has what each stands for, by its code point."""

    marked: str
    spellings: Mapping[int, str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        return self.marked.translate(self.spellings) if self.spellings else self.marked


class ControlTokens:
    """Those of one tokenizer: the special ones, and others between bars."""

    def __init__(self, fast: FastTokenizer) -> None:
        self._fast = fast
        added = fast.get_added_tokens_decoder().items()
        found = {token.content: (id, token) for id, token in added if token.special or BARS.fullmatch(token.content)}
        # The longest first: one may be a part of another.
        self._tokens: dict[str, tuple[int, AddedToken]] = {text: found[text] for text in sorted(found, key=len, reverse=True)}
        self._beginnings: dict[str, list[str]] = {}  # DeepSeek has 800: nearly every text is done with after a few of these
        for text in self._tokens:
            self._beginnings.setdefault(text[:3], []).append(text)

    def spelled_in(self, text: str) -> list[str]:
        found = {token for beginning, tokens in self._beginnings.items() if beginning in text for token in tokens if token in text}
        return [token for token in self._tokens if token in found] if found else []

    def marks(self, given: Any) -> dict[str, str]:
        """For each control token that is spelled in the strings of `given`, JSON of any depth, a mark that is not in them."""
        text = "\0".join(strings(given))
        found = [token for token in self.spelled_in(text) if token not in REASONING_TAGS]
        used = set(text) if found else set()
        free = (chr(point) for point in MARKS if chr(point) not in used)
        marks = dict(zip(found, free, strict=False))
        if len(marks) < len(found):
            raise InvalidRequest("messages: too many private characters beside the spelling of control tokens", "messages")
        return marks

    def encode(self, chat: RenderedChat, *, special: bool) -> list[int]:
        """The tokens of a chat that holds marks. `special` adds what the model expects around a prompt."""
        twin, words, ids = self._twin
        text = chat.marked
        for token in self.spelled_in(text):
            text = text.replace(token, words[token])
        found = twin.encode(text.translate(chat.spellings), add_special_tokens=special)
        of_text = {id for id, around in zip(found.ids, found.special_tokens_mask, strict=True) if not around}
        if forged := of_text & set(ids.values()):  # some vocabularies hold the spelling as a piece of text too
            spelling = self._fast.id_to_token(min(forged))
            raise InvalidRequest(f"messages: {spelling!r} is a control token of this model, and cannot be written as text", "messages")
        return [ids.get(id, id) for id in found.ids]

    @cached_property
    def _twin(self) -> tuple[FastTokenizer, dict[str, str], dict[int, int]]:
        """The same tokenizer, to which the control tokens' spellings are text and words that nobody can guess are the tokens; these
        words, and their ids there → the ids here."""
        twin = FastTokenizer.from_str(self._fast.to_str())
        secret = secrets.token_hex(16)
        words = {token: f"<{secret}-{id}>" for token, (id, _) in self._tokens.items()}
        twin.add_special_tokens([like(known, token, special=True) for token, (_, known) in self._tokens.items() if not known.special])
        twin.encode_special_tokens = True
        twin.add_tokens([like(known, words[token], special=False) for token, (_, known) in self._tokens.items()])
        words_there: dict[str, int] = twin.get_vocab()
        return twin, words, {words_there[words[token]]: id for token, (id, _) in self._tokens.items()}


def like(token: AddedToken, text: str, *, special: bool) -> AddedToken:
    return AddedToken(
        text, single_word=token.single_word, lstrip=token.lstrip, rstrip=token.rstrip, normalized=token.normalized, special=special
    )


def strings(given: Any) -> Iterator[str]:
    if isinstance(given, str):
        yield given
    elif isinstance(given, Mapping):
        for name, value in given.items():
            yield from strings(name)
            yield from strings(value)
    elif isinstance(given, list):
        for value in given:
            yield from strings(value)


def marked(given: Any, marks: Mapping[str, str]) -> Any:
    """A copy of `given` with marks in the place of spellings."""
    if isinstance(given, str):
        for spelling, mark in marks.items():
            given = given.replace(spelling, mark)
        return given
    if isinstance(given, Mapping):
        return {marked(name, marks): marked(value, marks) for name, value in given.items()}
    return [marked(value, marks) for value in given] if isinstance(given, list) else given
