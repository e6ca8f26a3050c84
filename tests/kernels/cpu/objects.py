"""Runs the tests of this folder with objects that are not this machine's.

    python -m tests.kernels.cpu.objects {avx512,avx512_vnni,avx512_bf16,avx512_amx,neon,neon_bf16,sanitized} [--sample] [pytest's options]

The instruction sets that it lacks are emulated: their sources are compiled for AVX2, with emulated/ in place of the compiler's
intrinsics (SIMDe's functions, Debian's libsimde-dev, and a few of our own). `sanitized` is the object of its own instruction set with
gcc's address and undefined-behaviour sanitizers. --sample: of each test function the case in the middle, to be quick.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mtpserve_kernels.cpu import build

HERE = Path(__file__).parent
HEADERS = HERE / "emulated"
SANITIZED = "sanitized"
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g1", "-O1")


def emulated_sets() -> dict[str, build.InstructionSet]:
    # The headers are a part of what is compiled, so of its name. At -O3 gcc takes minutes for the masks of SIMDe, at -O1 thrice as long
    # as at -Og.
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(HEADERS.glob("*.h")))).hexdigest()[:16]
    common = ("-Og", "-mfma", f"-DEMULATED={digest}", "-I", str(HEADERS), "-include")
    avx512, neon = ("-mavx2", *common, str(HEADERS / "avx512.h")), (*common, str(HEADERS / "neon.h"))
    flags = {
        "avx512": avx512,
        "avx512_vnni": ("-DEMULATE_VNNI", *avx512),
        "avx512_bf16": ("-DEMULATE_VNNI", "-DEMULATE_BF16", *avx512),
        "avx512_amx": ("-DEMULATE_VNNI", "-DEMULATE_BF16", "-DEMULATE_AMX", *avx512),
        "neon": neon,
        "neon_bf16": ("-DEMULATE_BF16", *neon),
    }
    return {name: build.InstructionSet(name, "x86_64", frozenset({"avx2", "fma"}), chosen) for name, chosen in flags.items()}


def missing(name: str) -> str | None:
    """Why this machine cannot run the tests with that object; None where it can."""
    if not build.available():
        return "none of the kernels' instruction sets"
    try:
        command = build.compiler(build.available()[0].machine)
    except build.BuildError as error:
        return str(error)
    if name == SANITIZED:
        return None if sanitizer_libraries(command) else "no sanitizers: gcc's libasan and libubsan are needed"
    if not build.cpu_flags() >= {"avx2", "fma"}:
        return "no AVX2 to emulate with"
    asked = subprocess.run(
        [*command, "-E", "-xc++", "-"], input="#include <simde/x86/avx512.h>", capture_output=True, text=True, check=False
    )
    return f"no SIMDe (libsimde-dev): {asked.stderr.splitlines()[0]}" if asked.returncode else None


def sanitizer_libraries(command: list[str]) -> list[str]:
    """What must be loaded before everything else in the process; empty where the compiler has none."""

    def path_of(name: str) -> str:
        return subprocess.run([*command, f"-print-file-name={name}"], capture_output=True, text=True, check=False).stdout.strip()

    paths = [path_of("libasan.so"), path_of("libubsan.so")]
    return paths if all(map(os.path.isabs, paths)) else []


class Sample:
    """A plugin: of each test function the case in the middle."""

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[Any]) -> None:
        cases: dict[str, list[Any]] = {}
        for item in items:
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
        chosen = [some[len(some) // 2] for some in cases.values()]
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen


def main(name: str, *options: str) -> int:
    if name == SANITIZED:
        libraries = " ".join(sanitizer_libraries(build.compiler(build.available()[0].machine)))
        if os.environ.get("LD_PRELOAD") != libraries:
            # Python itself frees little at its end, and threads of torch's are never joined.
            settings = {"LD_PRELOAD": libraries, "ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}
            os.execve(sys.executable, [sys.executable, "-m", "tests.kernels.cpu.objects", name, *options], {**os.environ, **settings})
        build.INSTRUCTION_SETS = tuple(replace(isa, flags=(*isa.flags, *SANITIZERS)) for isa in build.available()[:1])
    else:
        build.INSTRUCTION_SETS = (emulated_sets()[name],)
    os.environ.pop("MTPSERVE_CPU_ISA", None)
    build.object_of(build.INSTRUCTION_SETS[0])  # an error here, where the tests would be skipped
    arguments = [option for option in options if option != "--sample"]
    if not any(Path(option.partition("::")[0]).exists() for option in arguments):
        arguments.append(str(HERE))
    # --capture=sys: what a sanitizer says while it ends the process is seen.
    fixed = ["-q", "--capture=sys", "-p", "no:cacheprovider", *(f"--ignore={HERE / name}" for name in ("test_objects.py", "test_build.py"))]
    return int(pytest.main([*fixed, *arguments], plugins=[Sample()] if "--sample" in options else []))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
