"""argparse, but underscores are dashes, names of peers are understood, and an error is a ConfigError. No
option may be abbreviated: a later option with the same beginning would change what a command means."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from mtpserve.cli.help import Formatter, Help
from mtpserve.cli.noops import PEER_VALUES, is_no_op, takes_value
from mtpserve.cli.options import OBJECTS, suggest
from mtpserve.cli.peers import SHORT, WITH_VALUE
from mtpserve.core.errors import ConfigError

FLAG = re.compile(r"--[A-Za-z][\w-]*")
LEVEL = re.compile(r"-O(\d)")  # vLLM's -O3
MEMBER = re.compile(r"(-[A-Za-z]+|--[A-Za-z][\w-]*)\.([^=]+)(=.*)?", re.DOTALL)


class Parser(argparse.ArgumentParser):
    def __init__(self, **options: Any) -> None:
        # argparse rejects a prefix of two names of one option as ambiguous; `_full` does not.
        super().__init__(allow_abbrev=False, add_help=False, formatter_class=Formatter, **options)
        self.add_argument(
            "-h",
            "--help",
            action=Help,
            metavar="all|WORD",
            help="show the common options, all of them, or those with a word in their name or subject",
        )

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        return self.parse_args(list(self._expand(self._joined(list(self._needed(arguments))))))

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see {self.prog} --help)")

    def _needed(self, arguments: Sequence[str]) -> Iterator[str]:
        """The arguments but those of peers that change nothing, with their values."""
        remaining = list(arguments)
        while remaining and remaining[0] != "--" and self._has("--config"):
            flag, equals, value = (argument := remaining.pop(0)).partition("=")
            if (level := LEVEL.fullmatch(argument)) is not None:
                flag, equals, value = "-O", "=", level[1]
            name = self._other(flag.partition(".")[0]).lstrip("-").replace("_", "-")
            following = remaining[0] if remaining else None
            takes = not equals and following is not None and takes_value(name, following)
            if not flag.startswith("-") or (self._has(f"--{name}") and name not in PEER_VALUES):
                yield argument
            elif name in WITH_VALUE:
                yield from [WITH_VALUE[name]] if self._has(WITH_VALUE[name].partition("=")[0]) else []
            elif is_no_op(name, value if equals else following if takes else None):
                del remaining[: int(takes)]
            else:
                yield argument
        yield from remaining

    def _joined(self, arguments: Sequence[str]) -> Sequence[str]:
        """Joins an object's members, which vLLM writes one by one: `--x.a 1 --x.b.c=text --x.d+ 2` becomes
        `--x={"a": 1, "b": {"c": "text"}, "d": [2]}`. A `--x` with JSON is a part of it."""
        if not any(map(MEMBER.fullmatch, arguments)):
            return arguments
        rest: list[str] = []
        objects: dict[str, dict[str, Any]] = {}
        remaining = iter(arguments)
        for argument in remaining:
            if argument == "--":
                rest += [argument, *remaining]
            elif (member := MEMBER.fullmatch(argument)) is not None:
                name, path, value = self._object(member[1]), member[2], member[3]
                text = next(remaining, None) if value is None else value[1:]
                if text is None:
                    raise ConfigError(f"{argument}: expected one argument")
                put(objects.setdefault(name, {}), path.split("."), value_of(text), argument.partition("=")[0])
            else:
                rest.append(argument)
        return [
            *self._without(rest, objects),
            *(f"{name}={json.dumps(members)}" for name, members in objects.items()),
        ]

    def _object(self, flag: str) -> str:
        """The option that takes an object, by its first name."""
        name = self._full(flag)
        if name not in OBJECTS:
            raise ConfigError(f"{flag} is not a JSON option: only {', '.join(OBJECTS)} have members")
        return name

    def _without(self, arguments: Sequence[str], objects: dict[str, dict[str, Any]]) -> Iterator[str]:
        """The arguments but those that are one of the `objects`, which get their members."""
        remaining = iter(arguments)
        for argument in remaining:
            if argument == "--":
                yield argument
                yield from remaining
                return
            flag, equals, value = argument.partition("=")
            flag = self._other(flag)
            if not FLAG.fullmatch(flag) or (name := self._full(flag)) not in objects:
                yield argument
                continue
            members = value_of(value if equals else next(remaining, ""))
            if not isinstance(members, dict):
                raise ConfigError(f"{name} must be a JSON object, got {members!r}")
            for key, inner in members.items():
                put(objects[name], [key], inner, f"{name}.{key}")

    def _expand(self, arguments: Sequence[str]) -> Iterator[str]:
        plain = False
        for argument in arguments:
            plain = plain or argument == "--"
            flag, equals, value = argument.partition("=")
            is_flag = not plain and (FLAG.fullmatch(flag) or self._other(flag) != flag)
            yield self._full(flag) + equals + value if is_flag else argument

    def _has(self, flag: str) -> bool:
        return flag in self._option_string_actions

    def _other(self, flag: str) -> str:
        """The name here of a peer's option."""
        return flag if self._has(flag) else SHORT.get(flag.replace("_", "-"), flag)

    def _full(self, flag: str) -> str:
        spelling = self._other(flag).replace("_", "-")
        if not self._has(spelling):
            advice = suggest(
                spelling, (*self._option_string_actions, *(name for name in SHORT if len(name) > 4))
            )
            raise ConfigError(f"unknown option {flag}{advice} (see {self.prog} --help)")
        return spelling


def value_of(text: str) -> Any:
    """JSON where it is JSON, otherwise the text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def put(members: dict[str, Any], path: Sequence[str], value: Any, shown: str) -> None:
    """Sets the member at `path`; one whose name ends with + is a list, to which the value is added."""
    *outer, last = path
    for key in outer:
        members = members.setdefault(key, {})
        if not isinstance(members, dict):
            raise ConfigError(f"{shown}: {key!r} is no object")
    if last.endswith("+"):
        last, value = last[:-1], [*members.pop(last[:-1], []), value]
    if last in members:
        raise ConfigError(f"{shown} is given twice: {members[last]!r} and {value!r}")
    members[last] = value
