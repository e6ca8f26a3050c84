"""What the access log says of a refused request: the error, without texts of users. Numbers, types, roles,
model names and the server's own words stay; any other value is replaced by what kind of value it is."""

from __future__ import annotations

import re

QUOTED = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\""""  # a text as repr has it
WORD = r"[\w.:/@+-]{1,100}"  # no blanks: no sentence of a prompt
# Left to right: the first that begins somewhere takes what it spans.
PARTS = re.compile(
    rf"""(?P<allowed>\b(?:should|must)\ be\ (?:(?!\ got\ )[^;])*)  # the server's words
    |(?<=\ got\ )(?P<value>.*)
    |(?P<named>\b(?:type|role|model|tool_choice|Content-Encoding)\ (?:'{WORD}'|"{WORD}"))
    |(?<!\w)(?P<quoted>{QUOTED})""",
    re.VERBOSE | re.DOTALL,
)
SIMPLE = re.compile(
    r"(?:-?\d+(?:\.\d+)?(?:e[+-]?\d+)?|-?inf|nan|True|False|None|true|false|null)(?=$|[;,:)]| \(|\.$)"
)
TEXT = re.compile(rf"(?P<text>{QUOTED})(?=$|[;,:) ])", re.DOTALL)
WHOLE_WORD = re.compile(f"['\"]{WORD}['\"]")
KINDS = {"'": "a string", '"': "a string", "[": "a list", "(": "a list", "{": "an object"}


def redacted(message: str, names_models: bool = False) -> str:
    """The error without values that may be a user's text. `names_models`: what it quotes are names of
    models."""
    parts: list[str] = []
    enumerates, end = False, 0
    for part in PARTS.finditer(message):
        parts.append(message[end : part.start()])
        end = part.end()
        if part["allowed"] is not None:
            enumerates = "'" in part["allowed"]  # 'a', 'b' or 'c': the field has words, and no text
            parts.append(part["allowed"])
        elif part["named"] is not None:
            parts.append(part["named"])
        elif part["quoted"] is not None:
            keeps = names_models and WHOLE_WORD.fullmatch(part["quoted"])
            parts.append(part["quoted"] if keeps else "…")
        else:
            parts.append(redacted_value(part["value"], enumerates))
    return "".join(parts) + message[end:]


def redacted_value(text: str, keeps_word: bool) -> str:
    """What stands behind "got", and the errors after it. `keeps_word`: a value without blanks stays."""
    if (simple := SIMPLE.match(text)) is not None:
        return simple[0] + redacted(text[simple.end() :])
    if (quoted := TEXT.match(text)) is None:
        return KINDS.get(text[:1], "…")
    keeps = keeps_word and WHOLE_WORD.fullmatch(quoted["text"])
    return (quoted["text"] if keeps else "a string") + redacted(text[quoted.end() :])
