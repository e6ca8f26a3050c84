"""What an option is: a field of a frozen dataclass. Its metadata: `help`, `aliases` (other names, SGLang's
and vLLM's among them, without the leading dashes), `choices`, `synonyms` (texts that mean a value)."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from mtpserve.core.errors import ConfigError

USUAL_PAGE = 16  # tokens, where nobody asks for another


def option(
    default: Any,
    help: str,
    *aliases: str,
    choices: tuple[str, ...] | None = None,
    secret: bool = False,
    synonyms: tuple[tuple[str, object], ...] = (),
) -> Any:
    more = {"choices": choices, "secret": secret, "synonyms": synonyms}
    return field(default=default, metadata={"help": help, "aliases": aliases, **more})


def check(good: bool, name: str, value: object, allowed: str) -> None:
    if not good:
        raise ConfigError(f"--{name.replace('_', '-')} must be {allowed}, got {value!r}")
