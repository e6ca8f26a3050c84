"""The tests of this folder with the instruction sets that this machine lacks, emulated, and with gcc's sanitizers: one case of each test
function; all cases with --all."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from mtpserve_kernels.cpu import build

from tests import selection
from tests.kernels.cpu.objects import SANITIZED, emulated_sets, missing

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def isa() -> None:
    """In place of the one that repeats a test for each instruction set."""


# Without --all, test_linear.py and test_vec.py run with emulated sets, too: the rest is the same source with other vectors.
# To compile the sanitized object takes as long as all other tests of this folder; `make sanitize` runs it, too.
@pytest.mark.thorough
@pytest.mark.parametrize("name", [*emulated_sets(), SANITIZED])
def test_all_of_this_folder(name: str) -> None:
    if (reason := missing(name)) is not None:
        pytest.skip(reason)
    command = [sys.executable, "-m", "tests.kernels.cpu.objects", name, *([] if selection.ALL else ["--sample"])]
    environment = os.environ | {"PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'kernels'}"}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    assert " passed" in done.stdout and " skipped" not in done.stdout, done.stdout[-2000:]


# The instructions of the former are those that are emulated, too.
@pytest.mark.parametrize("name", [pytest.param("neon", marks=pytest.mark.thorough), "neon_bf16"])
def test_products_on_arm(name: str, tmp_path: Path) -> None:
    """NEON's own instructions, and not SIMDe's functions: a program of its own, since Python here is x86's."""
    if (emulator := shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")) is None:
        pytest.skip("no qemu-aarch64 (qemu-user-static)")
    isa = next(isa for isa in build.INSTRUCTION_SETS if isa.name == name)
    try:
        command = [*build.compiler(isa.machine), *build.FLAGS, *isa.flags, "-O1", "-static", "-I", str(build.SOURCES)]
    except build.BuildError as error:
        pytest.skip(str(error))
    program = tmp_path / "products"
    given = [str(Path(__file__).with_name("products.cpp")), str(build.SOURCES / "linear.cpp")]
    subprocess.run([*command, *given, "-lgomp", "-lpthread", "-o", str(program)], check=True)
    done = subprocess.run([emulator, "-cpu", "max", str(program)], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout == "all products are right\n", done.stdout + done.stderr


def test_a_name_that_is_emulated_is_one_of_the_products() -> None:
    assert set(emulated_sets()) == {isa.name for isa in build.INSTRUCTION_SETS} - {"avx2"}
