"""Small files and small functions. A file that outgrows its limit is split by meaning, not by shortening its names."""

from __future__ import annotations

import ast
from dataclasses import fields
from statistics import median

from mtpserve.core.state.request_state import RequestState
from tests.house.tree import KERNELS, PACKAGE, ROOT, Function, functions, name, sources, text

FILE_BYTES, LINE_COLUMNS = 18_000, 110  # of the package; a limit in lines would pack lines
TEST_FILE, KERNEL_FILE, MEDIAN_FILE = 400, 450, 150  # lines
FUNCTION, KERNEL_FUNCTION = 60, 160
KERNEL_PARAMETERS = 25
STATE_FIELDS = 20


def lines(function: Function) -> int:
    assert function.end_lineno is not None
    return function.end_lineno - function.lineno + 1


def is_kernel(function: Function) -> bool:
    return any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def test_no_file_of_the_package_is_too_long() -> None:
    long = {name(file): size for file in sources(PACKAGE) if (size := len(file.read_bytes())) > FILE_BYTES}
    assert not long


def test_no_line_of_the_package_is_too_long() -> None:
    long = [
        f"{name(file)}:{number}"
        for file in sources(PACKAGE)
        for number, line in enumerate(text(file).splitlines(), 1)
        if len(line) > LINE_COLUMNS
    ]
    assert not long


def test_no_test_and_no_kernel_file_is_too_long() -> None:
    limits = [(file, KERNEL_FILE if KERNELS in file.parents else TEST_FILE) for file in sources(KERNELS, ROOT / "tests")]
    long = {name(file): count for file, limit in limits if (count := len(text(file).splitlines())) > limit}
    assert not long


def test_the_median_file_is_short() -> None:
    assert median(len(text(file).splitlines()) for file in sources(PACKAGE)) <= MEDIAN_FILE


def test_no_function_is_too_long() -> None:
    long = {
        f"{name(file)}:{function.name}": lines(function)
        for file in sources(PACKAGE, KERNELS)
        for function in functions(file)
        if lines(function) > (KERNEL_FUNCTION if is_kernel(function) else FUNCTION)
    }
    assert not long


def test_no_kernel_has_too_many_parameters() -> None:
    """Of all that Triton compiles, the parts of kernels too. What follows from other parameters is computed inside."""
    count = {
        f"{name(file)}:{function.name}": len([*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs])
        for file in sources(KERNELS)
        for function in functions(file)
        if is_kernel(function)
    }
    assert count and not {place: number for place, number in count.items() if number > KERNEL_PARAMETERS}


def test_the_state_of_a_request_has_few_fields() -> None:
    """What a room alone needs of a request is in a state of that room."""
    assert len(fields(RequestState)) <= STATE_FIELDS
