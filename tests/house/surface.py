"""What users can write: the package's names, the commands, their options. As text, so that a change to it shows in a diff.

make snapshot        (python -m tests.house.surface)
"""

from __future__ import annotations

import argparse
from importlib import import_module

import mtpserve
from mtpserve.cli.main import COMMANDS, module_of
from mtpserve.tools.bench.bench import BENCHMARKS
from tests.house import reference
from tests.house.tree import ROOT

SNAPSHOT = ROOT / "tests" / "house" / "cli_options.txt"


def option(action: argparse.Action) -> str:
    names = " ".join(action.option_strings) or action.dest
    return f"  {names} {action.metavar}" if action.metavar and action.option_strings else f"  {names}"


def options(module: str) -> list[str]:
    return [option(action) for action in import_module(module).parser()._actions]


def surface() -> str:
    lines = ["mtpserve.__all__", *(f"  {name}" for name in mtpserve.__all__)]
    for command in COMMANDS:
        lines += ["", f"mtpserve {command}"]
        if command != "version":
            lines += options(module_of(command)) if command != "bench" else [f"  {name}" for name in BENCHMARKS]
    for name, place in BENCHMARKS.items():
        lines += ["", f"mtpserve bench {name}", *options(place.split(":")[0])]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    SNAPSHOT.write_text(surface(), encoding="utf-8")
    reference.write()
