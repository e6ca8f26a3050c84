"""argparse, but underscores are dashes, an option may be abbreviated to a unique prefix, and an error is a ConfigError."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from mtpserve.cli.options import suggest
from mtpserve.cli.peers import SHORT
from mtpserve.core.errors import ConfigError

FLAG = re.compile(r"--[A-Za-z][\w-]*")


class Parser(argparse.ArgumentParser):
    def __init__(self, **options: Any) -> None:
        # argparse rejects a prefix of two names of one option as ambiguous; `_full` does not.
        super().__init__(allow_abbrev=False, **options)

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        return self.parse_args(list(self._expand(arguments)))

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see {self.prog} --help)")

    def _expand(self, arguments: Sequence[str]) -> Iterator[str]:
        plain = False
        for argument in arguments:
            plain = plain or argument == "--"
            flag, equals, value = argument.partition("=")
            flag = flag if plain else SHORT.get(flag, flag)
            yield argument if plain or not FLAG.fullmatch(flag) else self._full(flag) + equals + value

    def _full(self, flag: str) -> str:
        wanted, known = flag.replace("_", "-"), self._option_string_actions
        if wanted in known:
            return wanted
        longer = {known[name].dest: name for name in reversed(known) if name.startswith(wanted)}  # each option's first name
        if len(longer) > 1:
            raise ConfigError(f"{flag} could be {' or '.join(sorted(longer.values()))}")
        if not longer:
            raise ConfigError(f"unknown option {flag}{suggest(wanted, known)} (see {self.prog} --help)")
        return next(iter(longer.values()))
