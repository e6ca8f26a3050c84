"""`--help`: the options that people change, by subject; `--help all`: every option."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from mtpserve.cli.options import COMMON, Switch, all_options

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
        if values != "all":
            shorten(parser)
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
    parser.epilog = f"{parser.prog} --help all lists all {len(actions)} options."
