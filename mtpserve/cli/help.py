"""`--help`: the options that people change, by subject; `--help WORD`: those with a word; `--help all`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from mtpserve.cli.options import COMMON, Switch, all_options
from mtpserve.core.errors import ConfigError

MAX_CHOICES = 60  # characters; more are in docs/options.md and in the error for a wrong one
MANY = 40  # a command with fewer options shows all of them


class Formatter(argparse.HelpFormatter):
    """Names once, then what the value is; of a switch the names that change its default."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if isinstance(action, Switch):
            return ", ".join(action.shown)
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        value = self._format_args(action, self._get_default_metavar_for_optional(action))
        return f"{', '.join(action.option_strings)} {value if len(value) < MAX_CHOICES else 'NAME'}"


class Help(argparse.Action):
    """Prints the help and ends the program."""

    def __init__(self, option_strings: Sequence[str], dest: str, **more: Any) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs="?", default=argparse.SUPPRESS, **more)

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        if values is None:
            shorten(parser)
        elif values != "all":
            select(parser, values)
        parser.print_help()
        parser.exit()


def shorten(parser: argparse.ArgumentParser) -> None:
    """Hides the options of the configuration that are rarely changed. What a command alone has stays."""
    actions = parser._actions
    if len(actions) < MANY:
        return
    rare = {option.name for option in all_options()} - COMMON
    for action in actions:
        if action.dest in rare:
            action.help = argparse.SUPPRESS
    parser.epilog = (
        f"{parser.prog} --help all lists all {len(actions)} options, --help WORD those with a word in their"
        " names or in their group's title."
    )


def select(parser: argparse.ArgumentParser, word: str) -> None:
    """Hides the options unless `word` is in their names or in the title of their group. Raises ConfigError if
    nothing is left."""
    groups = [group for group in parser._action_groups if group._group_actions]
    titled = {
        action
        for group in groups
        if word.lower() in (group.title or "").lower()
        for action in group._group_actions
    }
    hidden = [
        action
        for action in parser._actions
        if action not in titled and not any(word in name for name in action.option_strings)
    ]
    if len(hidden) == len(parser._actions):
        subjects = ", ".join(repr(group.title) for group in groups[2:])
        raise ConfigError(f"--help {word}: no option and no subject has this word; subjects: {subjects}")
    for action in hidden:
        action.help = argparse.SUPPRESS
    parser.description = None
