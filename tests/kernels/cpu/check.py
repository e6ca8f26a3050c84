"""Is the C++ as clang-format writes it, and does it compile for every instruction set without a warning? `make check` runs it.

    python -m tests.kernels.cpu.check

What needs no compiler that is missing is compiled: for ARM on x86 that is Debian's g++-aarch64-linux-gnu. An object is kept like those that
are used, so that sources that did not change are not compiled again.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from mtpserve_kernels.cpu import build

# Less is optimised, since only whether it compiles is of interest.
MORE = ("-O1", "-Werror")
FOLDERS = (build.SOURCES, Path(__file__).parent)


def formatted() -> list[str]:
    """→ what clang-format would change, one line each."""
    if (tool := shutil.which("clang-format", path=str(Path(sys.executable).parent)) or shutil.which("clang-format")) is None:
        return ["clang-format is not installed: pip install -e '.[dev]'"]
    files = sorted(str(path) for folder in FOLDERS for path in folder.rglob("*") if path.suffix in (".h", ".cpp"))
    done = subprocess.run([tool, "--dry-run", "-Werror", *files], capture_output=True, text=True, check=False)
    return [line for line in done.stderr.splitlines() if "error:" in line] or ([done.stderr] if done.returncode else [])


def main() -> int:
    wrong = formatted()
    for isa in build.INSTRUCTION_SETS:
        try:
            build.compiler(isa.machine)
        except build.BuildError as error:
            print(f"{isa.name}: {error}: not compiled")
            continue
        try:
            build.object_of(isa, MORE)
            print(f"{isa.name}: compiled", flush=True)
        except build.BuildError as error:
            wrong.append(f"{isa.name}: {error}")
    print("\n".join(wrong) if wrong else "the C++ is formatted, and compiles")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
