"""Compiles the kernels for one instruction set, or finds the object that was compiled before.

An object is named after the hash of its sources and flags. A wheel brings objects in `objects/`; others are kept in the user's cache.

    python -m mtpserve_kernels.cpu.build                  what this machine runs
    python -m mtpserve_kernels.cpu.build --all DIRECTORY  every instruction set of this machine's kind; into `objects/` before
                                                          a wheel is built
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "src"
PACKAGED = Path(__file__).parent / "objects"
# -ffp-contract=off: what is fused into one rounding is written so, and is the same with every compiler.
# The warnings that are off are gcc's own about its AVX-512 header.
FLAGS = (
    "-std=c++20", "-O3", "-fPIC", "-fno-math-errno", "-ffp-contract=off", "-Wall", "-Wextra", "-Wno-uninitialized",
    "-Wno-maybe-uninitialized", "-Wno-psabi",
)  # fmt: skip
USUAL_TIME = "about 15 s on two cores, a minute and more on a slow or busy machine"  # for people who wait


class BuildError(Exception):
    """There is no compiler, or it failed, or its output cannot be kept; the message says which."""


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
    InstructionSet(
        "avx512_amx", "x86_64", frozenset({*AVX512, "avx512_bf16", "avx512_vnni", "fma", "amx_tile", "amx_bf16"}),
        (*BF16_FLAGS, "-mamx-tile", "-mamx-bf16"),
    ),
    InstructionSet("avx512_bf16", "x86_64", frozenset({*AVX512, "avx512_bf16", "avx512_vnni", "fma"}), BF16_FLAGS),
    InstructionSet("avx512_vnni", "x86_64", frozenset({*AVX512, "avx512_vnni", "fma"}), (*AVX512_FLAGS, "-mavx512vnni")),
    InstructionSet("avx512", "x86_64", frozenset({*AVX512, "fma"}), AVX512_FLAGS),
    InstructionSet("avx2", "x86_64", frozenset({"avx2", "fma"}), ("-mavx2", "-mfma")),
    # Neoverse V1 has bf16 units but not all of ARMv8.6.
    InstructionSet("neon_bf16", "aarch64", frozenset({"asimd", "atomics", "bf16"}), ("-march=armv8.2-a+bf16",)),
    InstructionSet("neon", "aarch64", frozenset({"asimd"}), ("-march=armv8-a",)),
)  # fmt: skip


def cpu_flags() -> frozenset[str]:
    """Of /proc/cpuinfo; none where there is no such file."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    named = [line.partition(":")[2] for line in lines if line.startswith(("flags", "Features"))]
    return frozenset(named[0].split()) if named else frozenset()


@cache
def may_use_tiles() -> bool:
    """Linux gives a process the tiles of AMX when it asks for them: their contents are kept when threads change."""
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    return bool(ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0)


def available() -> list[InstructionSet]:
    """That this machine has, the best first."""
    flags = cpu_flags()
    here = [isa for isa in INSTRUCTION_SETS if isa.machine == platform.machine() and isa.needs <= flags]
    return [isa for isa in here if "amx_tile" not in isa.needs or may_use_tiles()]


def compiler(machine: str) -> list[str]:
    """The command: $CXX, otherwise g++, clang++ or c++; for another kind of machine Debian's cross compiler. Raises BuildError."""
    native, own = machine == platform.machine(), shlex.split(os.environ.get("CXX", ""))
    if native and own:
        if not shutil.which(own[0]):
            raise BuildError(f"CXX={os.environ['CXX']} was not found")
        return own
    names = ("g++", "clang++", "c++") if native else (f"{machine}-linux-gnu-g++",)
    if (found := next((path for name in names if (path := shutil.which(name))), None)) is None:
        raise BuildError(f"no C++ compiler was found ({', '.join(('$CXX', *names) if native else names)})")
    return [found]


def sources(pattern: str) -> list[Path]:
    return sorted(SOURCES.glob(pattern))


def source_hash(isa: InstructionSet, more: tuple[str, ...] = ()) -> str:
    digest = hashlib.sha256(" ".join((*FLAGS, *isa.flags, *more)).encode())
    for path in (*sources("*.h"), *sources("*.cpp")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def cache_directory() -> Path:
    """Raises BuildError."""
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError as error:
        raise BuildError("there is no home directory to keep the compiled kernels in; XDG_CACHE_HOME can name a folder") from error
    return Path(base) / "mtpserve" / "kernels"


def compile_to(target: Path, isa: InstructionSet, more: tuple[str, ...] = ()) -> None:
    """Logs that it begins and how long it took. Raises BuildError. Two processes may compile at once: the object appears whole."""
    program = compiler(isa.machine)
    command = [*program, *FLAGS, *isa.flags, *more]
    log.info("compiling the CPU kernels for %s with %s: %s", isa.name, shlex.join(program), USUAL_TIME)
    start = time.perf_counter()

    def run(*arguments: str) -> None:
        try:
            done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
        except OSError as error:
            raise BuildError(f"{command[0]} does not run: {error}") from error
        if done.returncode:
            said = done.stderr[max(done.stderr.find("error:") - 200, 0) :][:2000].strip()
            raise BuildError(f"{command[0]} failed: {said or f'exit status {done.returncode}'}")

    def compile_one(source: Path, directory: str) -> str:
        made = str(Path(directory) / f"{source.stem}.o")
        run("-c", str(source), "-o", made)
        return made

    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as directory, ThreadPoolExecutor(os.cpu_count()) as pool:
            parts = list(pool.map(lambda source: compile_one(source, directory), sources("*.cpp")))
            linked = Path(directory) / "linked.so"
            # LDFLAGS changes no object's name: with what it is linked changes nothing of what it computes.
            run("-shared", *parts, *shlex.split(os.environ.get("LDFLAGS", "")), "-o", str(linked))
            linked.replace(target)
        log.info("compiled the CPU kernels for %s in %.0f s: %s", isa.name, time.perf_counter() - start, target)
    except OSError as error:
        raise BuildError(
            f"the compiled kernels cannot be kept in {target.parent}: {error}; XDG_CACHE_HOME can name another folder"
        ) from error


def object_of(isa: InstructionSet, more: tuple[str, ...] = ()) -> Path:
    """The compiled object; compiles it where there is none. Raises BuildError. `more`: further flags, of a sanitizer for example."""
    name = f"{isa.name}-{source_hash(isa, more)}.so"
    if (packaged := PACKAGED / name).exists():
        return packaged
    target = cache_directory() / name
    if not target.exists():
        compile_to(target, isa, more)
    return target


def main() -> int:
    parser = argparse.ArgumentParser(description="Compile the kernels of a CPU.")
    parser.add_argument("--all", type=Path, metavar="DIRECTORY", help="every instruction set of this machine's kind, for a wheel")
    directory = parser.parse_args().all
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    chosen = available()[:1] if directory is None else [isa for isa in INSTRUCTION_SETS if isa.machine == platform.machine()]
    if not chosen:
        print("No CPU kernels: they are not written for this machine. Everything runs on plain torch.")
    try:
        for isa in chosen:
            if directory is None:
                object_of(isa)
                print(f"the CPU kernels for {isa.name} are ready", flush=True)
            else:
                compile_to(directory / f"{isa.name}-{source_hash(isa)}.so", isa)
    except BuildError as error:
        print(f"No CPU kernels: {error}. Everything runs on plain torch.")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
