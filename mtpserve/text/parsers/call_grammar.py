"""Building blocks of the call formats' grammars, in llguidance's Lark. Checks no schema."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from mtpserve.text.grammars.json_schema import with_layout
from mtpserve.text.parsers.tools import Schema, Spell

ANYTHING = "/(?s:.*)/"


def text(characters: str) -> str:
    return json.dumps(characters, ensure_ascii=False)


def spelled_by(token_of: Callable[[str], int | None]) -> Spell:
    """`token_of`: the id of an added token by its text. A model writes its markers with added tokens, so a
    grammar must name those."""

    def spell(characters: str) -> str:
        token = token_of(characters)
        return text(characters) if token is None else f"<[{token}]>"

    return spell


def arguments_json(schema: Schema) -> str:
    return "%json " + with_layout(dict(schema))


def up_to(name: str, marker: str, spell: Spell, *rest: str, before: str = "") -> str:
    """A rule `name`: any text in which `before` and `marker` do not occur, then these and the `rest`.
    `before` is characters, no token."""
    spelled, after = spell(marker), " ".join(map(spell, rest))
    if spelled.startswith("<["):
        anything = ANYTHING[:-1] + "".join(f"\\x{{{ord(letter):x}}}" for letter in before) + "/"
        return f"{name}: {anything} {spelled} {after}\n"
    # `suffix` applies to a whole rule, so the text up to the marker needs its own.
    return f"{name}: {name}_text {after}\n{name}_text[suffix={text(before + marker)}]: {ANYTHING}\n"


def calls_of(
    expressions: Sequence[str],
    several: bool,
    *,
    begin: str = "",
    between: str = '""',
    end: str = "",
    rules: str = "",
) -> str:
    """The rule `calls`. `expressions`: one expression per tool, a call of it; `rules`: the rules that these
    refer to."""
    more = f" ({between} call)*" if several else ""
    return f"calls: {begin} call{more} {end}\ncall: {' | '.join(f'({one})' for one in expressions)}\n{rules}"
