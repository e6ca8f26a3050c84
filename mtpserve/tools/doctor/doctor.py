"""`mtpserve doctor`: prints what a bug report needs, and tests the kernels of this device. Exit code 1 if a
test fails."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from itertools import chain
from typing import TYPE_CHECKING

from mtpserve.cli.parser import Parser
from mtpserve.core.errors import ConfigError

if TYPE_CHECKING:
    from mtpserve.tools.doctor.self_test import CheckResult


def parser() -> Parser:
    arg_parser = Parser(
        prog="mtpserve doctor",
        usage="%(prog)s [options]",
        description="Print versions and devices, and test this device's kernels against plain torch.",
    )
    arg_parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="whose kernels are tested (default: auto, a GPU if there is one)",
    )
    arg_parser.add_argument(
        "--no-self-test", action="store_true", help="print versions and devices only, without a test"
    )
    arg_parser.add_argument("--json", action="store_true", help="print one JSON object")
    return arg_parser


def run(arguments: Sequence[str]) -> int:
    options = parser().parse(arguments)
    import torch

    from mtpserve.tools.doctor.environment import environment, warnings_of

    has_gpu = torch.cuda.is_available()
    if options.device == "cuda" and not has_gpu:
        raise ConfigError("--device cuda: torch finds no GPU")
    device = ("cuda" if has_gpu else "cpu") if options.device == "auto" else options.device
    facts = environment()
    warnings = list(warnings_of(facts))
    if not options.json:
        width = max(map(len, facts))
        print("\n".join(f"{name:{width}}  {value}" for name, value in facts.items()))
        print(*(f"warning: {line}" for line in warnings), sep="\n", end="\n" if warnings else "")
    results = [] if options.no_self_test else tested(device, quiet=options.json)
    if options.json:
        report = {"environment": facts, "warnings": warnings, "tests": [asdict(result) for result in results]}
        print(json.dumps(report, indent=2))
    return 0 if all(result.passed for result in results) else 1


def tested(device: str, quiet: bool) -> list[CheckResult]:
    """Runs the tests, and prints each result when it is there unless `quiet`."""
    from mtpserve.tools.doctor.self_test import check_engine, check_kernels, kernel_set

    if not quiet:
        note = " The first run compiles them, which takes minutes." if device == "cuda" else ""
        print(f"\ntesting the {kernel_set(device)} kernels on {device}.{note}")
    results = []
    for result in chain(check_kernels(device), check_engine(device)):
        results.append(result)
        if not quiet:
            verdict = "ok" if result.passed else "FAILED"
            print(f"{verdict:7} {result.name:18} {result.seconds:6.2f} s  {result.detail}", flush=True)
    failed = [result.name for result in results if not result.passed]
    if not quiet:
        seconds = sum(result.seconds for result in results)
        print(f"{len(results) - len(failed)} of {len(results)} passed in {seconds:.1f} s")
    if failed:
        print(f"mtpserve doctor: failed: {', '.join(failed)}", file=sys.stderr)
    return results
