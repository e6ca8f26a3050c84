"""The entry point: `mtpserve COMMAND …`. A command's module is imported when it runs, and torch only when the
command needs it."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from mtpserve import __version__
from mtpserve.cli.options import suggest
from mtpserve.core.errors import ConfigError, MTPServeError
from mtpserve.core.logs import current_format

log = logging.getLogger(__name__)

COMMANDS = {
    "launch": "serve a model over HTTP with OpenAI's API",
    "generate": "continue a prompt in the terminal, with each token coloured by its origin",
    "inspect": "print a checkpoint's architecture, weights and memory plan without loading it",
    "prove": (
        "test that a model's output is the same as with plain decoding: greedy identity, and one "
        "test per sampling feature"
    ),
    "replay": "run recorded steps again and compare the results",
    "doctor": "print versions and devices, and test this device's kernels",
    "experts": "assign a model's experts to engines by measured load",
    "bench": "benchmark a running server, a model's answers, decoding settings, or the prefix cache",
    "version": "print the version",
}

ALIASES = {"serve": "launch"}  # vLLM's
TOOLS = {
    "inspect": "mtpserve.tools.inspect.inspect_command",
    "prove": "mtpserve.tools.prove.prove",
    "replay": "mtpserve.tools.replay.replay_command",
    "bench": "mtpserve.tools.bench.bench",
    "doctor": "mtpserve.tools.doctor.doctor",
}


def module_of(command: str) -> str:
    return TOOLS.get(command, f"mtpserve.cli.{ALIASES.get(command, command)}")


def usage() -> str:
    lines = [f"  {name:10} {line}" for name, line in COMMANDS.items()]
    return "\n".join(
        [
            "usage: mtpserve COMMAND [options]",
            "",
            *lines,
            "",
            "mtpserve COMMAND --help lists the options of a command.",
        ]
    )


def dispatch(arguments: Sequence[str]) -> int:
    command = arguments[0] if arguments else "--help"
    if command in ("-h", "--help", "help"):
        print(usage())
        return 0 if arguments else 2
    if command in ("version", "--version", "-V"):
        print(f"mtpserve {__version__}")
        return 0
    if command not in (*COMMANDS, *ALIASES):
        raise ConfigError(
            f"unknown command {command!r}{suggest(command, (*COMMANDS, *ALIASES))} (see mtpserve --help)"
        )
    code: int = import_module(module_of(command)).run(arguments[1:])
    return code


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 2 for errors in the command line or the config file, 1 for other errors."""
    try:
        return dispatch(sys.argv[1:] if arguments is None else arguments)
    except MTPServeError as error:
        message = "; ".join(str(error).splitlines())
        if current_format() == "json":
            log.critical("%s", message)
        else:
            print(f"mtpserve: {message}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader has closed the pipe (`| head`): no message, and none from the interpreter's final flush
        # either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
