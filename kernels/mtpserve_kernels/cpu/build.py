"""Compiles the kernels for one instruction set, or finds the object that was compiled before.

An object is named after the hash of its sources and flags. A wheel brings objects in `objects/`; others are kept in the user's cache.
`python -m mtpserve_kernels.cpu.build [--all DIRECTORY]` compiles what this machine runs, or every instruction set for a wheel.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).parent / "src"
PACKAGED = Path(__file__).parent / "objects"
# -ffp-contract=off: what is fused into one rounding is written so, and is the same with every compiler.
# The warnings that are off are gcc's own about its AVX-512 header.
FLAGS = (
    "-std=c++20", "-O3", "-fPIC", "-fopenmp", "-fno-math-errno", "-ffp-contract=off", "-Wall", "-Wextra", "-Wno-uninitialized",
    "-Wno-maybe-uninitialized", "-Wno-psabi",
)  # fmt: skip


class BuildError(Exception):
    """There is no compiler, or it failed."""


@dataclass(frozen=True, slots=True)
class InstructionSet:
    name: str
    machine: str  # platform.machine()
    needs: frozenset[str]  # flags of /proc/cpuinfo
    flags: tuple[str, ...]


AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl")
AVX512_FLAGS = (*(f"-m{flag}" for flag in AVX512), "-mfma")
BF16_FLAGS = (*AVX512_FLAGS, "-mavx512bf16", "-mavx512vnni")
# From the best to the least.
INSTRUCTION_SETS = (
    InstructionSet("avx512_bf16", "x86_64", frozenset({*AVX512, "avx512_bf16", "avx512_vnni", "fma"}), BF16_FLAGS),
    InstructionSet("avx512_vnni", "x86_64", frozenset({*AVX512, "avx512_vnni", "fma"}), (*AVX512_FLAGS, "-mavx512vnni")),
    InstructionSet("avx512", "x86_64", frozenset({*AVX512, "fma"}), AVX512_FLAGS),
    InstructionSet("avx2", "x86_64", frozenset({"avx2", "fma"}), ("-mavx2", "-mfma")),
)


def cpu_flags() -> frozenset[str]:
    """Of /proc/cpuinfo; none where there is no such file."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    named = [line.partition(":")[2] for line in lines if line.startswith(("flags", "Features"))]
    return frozenset(named[0].split()) if named else frozenset()


def available() -> list[InstructionSet]:
    """That this machine has, the best first."""
    flags = cpu_flags()
    return [isa for isa in INSTRUCTION_SETS if isa.machine == platform.machine() and isa.needs <= flags]


def compiler() -> str | None:
    """The path of $CXX, g++, clang++ or c++, whichever is found first."""
    names = (os.environ.get("CXX", ""), "g++", "clang++", "c++")
    return next((path for name in names if name and (path := shutil.which(name))), None)


def source_hash(isa: InstructionSet, more: tuple[str, ...] = ()) -> str:
    digest = hashlib.sha256(" ".join((*FLAGS, *isa.flags, *more)).encode())
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def cache_directory() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "mtpserve" / "kernels"


def compile_to(target: Path, isa: InstructionSet, more: tuple[str, ...] = ()) -> None:
    """Raises BuildError. Two processes may compile at once: the object appears whole."""
    if (compile_with := compiler()) is None:
        raise BuildError("no C++ compiler was found (CXX, g++, clang++, c++)")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as directory:

        def run(*arguments: str) -> None:
            done = subprocess.run([compile_with, *FLAGS, *isa.flags, *more, *arguments], capture_output=True, text=True, check=False)
            if done.returncode:
                raise BuildError(f"{compile_with} failed:\n{done.stderr[-2000:]}")

        def compile_one(source: Path) -> str:
            made = str(Path(directory) / f"{source.stem}.o")
            run("-c", str(source), "-o", made)
            return made

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            parts = list(pool.map(compile_one, sorted(SOURCES.glob("*.cpp"))))
        linked = Path(directory) / "linked.so"
        # Without -fopenmp: the symbols of OpenMP are those of torch's own library, so that there is one thread pool.
        link = [flag for flag in (*FLAGS, *more) if flag != "-fopenmp"]
        done = subprocess.run([compile_with, *link, "-shared", *parts, "-o", str(linked)], capture_output=True, text=True, check=False)
        if done.returncode:
            raise BuildError(f"{compile_with} failed:\n{done.stderr[-2000:]}")
        linked.replace(target)


def object_of(isa: InstructionSet, more: tuple[str, ...] = ()) -> Path:
    """The compiled object; compiles it where there is none. Raises BuildError. `more`: further flags, of a sanitizer for example."""
    name = f"{isa.name}-{source_hash(isa, more)}.so"
    for directory in (PACKAGED, cache_directory()):
        if (found := directory / name).exists():
            return found
    target = cache_directory() / name
    compile_to(target, isa, more)
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description="Compile the kernels of a CPU.")
    parser.add_argument("--all", type=Path, metavar="DIRECTORY", help="every instruction set of this machine's kind, for a wheel")
    chosen = parser.parse_args()
    if chosen.all is None:
        for isa in available()[:1]:
            print(object_of(isa))
        return
    for isa in INSTRUCTION_SETS:
        if isa.machine == platform.machine():
            compile_to(chosen.all / f"{isa.name}-{source_hash(isa)}.so", isa)


if __name__ == "__main__":
    main()
