"""How the objects are compiled, kept and chosen: with a compiler that is missing, broken or slow, and a folder that cannot be written."""

from __future__ import annotations

import os
import platform
import re
import shutil
import stat
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from mtpserve_kernels.cpu import build, library

REPOSITORY = Path(__file__).parents[3]
ISA = build.InstructionSet("made-up", platform.machine(), frozenset(), ())
# Writes its own arguments to where -o says.
WRITES = 'sleep 0.05; for last; do :; done; echo "$@" > "$last"'


@pytest.fixture(autouse=True)
def isa() -> None:
    """In place of the one that loads an object: there may be no compiler here."""


@pytest.fixture(autouse=True)
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("MTPSERVE_CPU_ISA", raising=False)
    monkeypatch.setattr(library, "in_use", [])
    library.chosen.cache_clear()
    library.load.cache_clear()
    yield
    library.chosen.cache_clear()
    library.load.cache_clear()


def fake_compiler(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = folder / "fake-c++"
    path.write_text(f"#!/bin/sh\necho run >> {folder}/runs\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CXX", str(path))
    return path


def unavailable() -> str:
    with pytest.raises(library.Unavailable) as raised:
        library.library()
    return str(raised.value)


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(build.BuildError, match=r"no C\+\+ compiler was found \(\$CXX, g\+\+, clang\+\+, c\+\+\)"):
        build.object_of(ISA)
    monkeypatch.setenv("CXX", "ccache g++")
    with pytest.raises(build.BuildError, match=r"CXX=ccache g\+\+ was not found"):
        build.object_of(ISA)
    monkeypatch.delenv("CXX")
    monkeypatch.setattr(build, "cpu_flags", lambda: frozenset().union(*(isa.needs for isa in build.INSTRUCTION_SETS)))
    monkeypatch.setattr(build, "may_use_tiles", lambda: True)
    if any(isa.machine == platform.machine() for isa in build.INSTRUCTION_SETS):
        assert "no C++ compiler" in unavailable()


def test_a_broken_compiler_is_run_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_compiler(tmp_path, "echo 'x.cpp:1: error: it is Monday' >&2; exit 1", monkeypatch)
    monkeypatch.setattr(library, "available", lambda: [ISA])
    assert "it is Monday" in unavailable()
    runs = (tmp_path / "runs").read_text()
    assert "it is Monday" in unavailable()
    assert (tmp_path / "runs").read_text() == runs
    assert not list(build.cache_directory().iterdir())


def test_a_compiler_that_does_not_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = fake_compiler(tmp_path, "", monkeypatch)
    path.write_bytes(b"\x7fELF nothing")
    with pytest.raises(build.BuildError, match=r"does not run: .*Exec format error"):
        build.object_of(ISA)


def test_a_folder_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_compiler(tmp_path, WRITES, monkeypatch)
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(build.BuildError, match=r"cannot be kept in .*; XDG_CACHE_HOME can name another folder"):
        build.object_of(ISA)


def test_no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(build.BuildError, match="no home directory"):
        build.object_of(ISA)


def test_two_compile_at_once_and_both_find_a_whole_object(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_compiler(tmp_path, WRITES, monkeypatch)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: build.object_of(ISA), range(2))
    assert first == second and "-shared" in first.read_text()
    assert [path.name for path in first.parent.iterdir()] == [first.name]
    runs = (tmp_path / "runs").read_text()
    assert build.object_of(ISA) == first and (tmp_path / "runs").read_text() == runs, "compiled before"


def test_an_object_is_named_after_all_that_is_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names = {build.source_hash(isa) for isa in build.INSTRUCTION_SETS} | {build.source_hash(ISA, ("-O1",)), build.source_hash(ISA)}
    assert len(names) == len(build.INSTRUCTION_SETS) + 2
    copied = shutil.copytree(build.SOURCES, tmp_path / "src")
    monkeypatch.setattr(build, "SOURCES", copied)
    assert build.source_hash(ISA) in names
    (copied / "vec.h").write_text((copied / "vec.h").read_text() + "\n")
    assert build.source_hash(ISA) not in names


def test_what_a_wheel_brings_is_not_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_compiler(tmp_path, "exit 1", monkeypatch)
    monkeypatch.setattr(build, "PACKAGED", tmp_path)
    brought = tmp_path / f"{ISA.name}-{build.source_hash(ISA)}.so"
    brought.write_text("")
    assert build.object_of(ISA) == brought


def test_an_object_that_lacks_functions_is_refused_when_it_is_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    try:
        command = build.compiler(platform.machine())
    except build.BuildError as error:
        pytest.skip(str(error))
    (tmp_path / "x.cpp").write_text('extern "C" { void no_such_function(); void mtp_linear() { no_such_function(); } }')
    subprocess.run([*command, "-shared", "-fPIC", str(tmp_path / "x.cpp"), "-o", str(tmp_path / "x.so")], check=True)
    monkeypatch.setattr(library, "available", lambda: [ISA])
    monkeypatch.setattr(library, "object_of", lambda isa: tmp_path / "x.so")
    assert "no_such_function" in (said := unavailable()) and "torch's OpenMP library: " in said


def test_which_openmp_library() -> None:
    line = "7f0000000000-7f0000001000 r-xp 00000000 fe:00 1 {}\n".format
    torch, other = Path("/env/site-packages/torch"), line("/usr/lib/libgomp.so.1")
    assert library.openmp_of(other + line(f"{torch}/lib/libgomp-a34b.so.1"), torch) == f"{torch}/lib/libgomp-a34b.so.1"
    assert library.openmp_of(other + line(f"{torch}.libs/libgomp-0b1c.so.1.0.0"), torch) == f"{torch}.libs/libgomp-0b1c.so.1.0.0"
    assert library.openmp_of(line("/conda/lib/libiomp5.so") + line("/usr/lib/libgompertz.so"), torch) == "/conda/lib/libiomp5.so"
    assert library.openmp_of(line("/conda/lib/libomp.so"), torch) == "/conda/lib/libomp.so"
    assert library.openmp_of(line("/usr/lib/libc.so.6") + line("[heap]"), torch) is None


def test_the_instruction_set_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    best, least = replace(ISA, name="best"), replace(ISA, name="least")
    monkeypatch.setattr(library, "available", lambda: [best, least])
    assert library.wanted() == best
    monkeypatch.setenv("MTPSERVE_CPU_ISA", "least")
    assert library.wanted() == least
    monkeypatch.setenv("MTPSERVE_CPU_ISA", "avx1024")
    assert unavailable() == "MTPSERVE_CPU_ISA=avx1024 is not one of this machine's: best, least, none"
    monkeypatch.setenv("MTPSERVE_CPU_ISA", "none")
    library.chosen.cache_clear()
    assert unavailable() == "MTPSERVE_CPU_ISA=none"


def test_a_machine_without_proc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """macOS and Windows have no /proc/cpuinfo."""
    monkeypatch.setattr(build, "cpu_flags", frozenset)
    assert build.available() == []
    assert "are written for AVX2, AVX-512 and NEON on Linux" in unavailable()


@pytest.mark.parametrize("flags", ["avx2 fma", "avx2", "asimd", "asimd atomics bf16", "avx512f avx512bw avx512dq avx512vl fma avx2"])
def test_which_instruction_sets_a_machine_has(monkeypatch: pytest.MonkeyPatch, flags: str) -> None:
    expected = {
        "avx2 fma": ["avx2"], "avx2": [], "asimd": ["neon"], "asimd atomics bf16": ["neon_bf16", "neon"],
        "avx512f avx512bw avx512dq avx512vl fma avx2": ["avx512", "avx2"],
    }  # fmt: skip
    monkeypatch.setattr(build, "cpu_flags", lambda: frozenset(flags.split()))
    monkeypatch.setattr(platform, "machine", lambda: "aarch64" if "asimd" in flags else "x86_64")
    assert [isa.name for isa in build.available()] == expected[flags]


def test_tiles_need_the_systems_permission(monkeypatch: pytest.MonkeyPatch) -> None:
    amx = build.INSTRUCTION_SETS[0]
    monkeypatch.setattr(build, "cpu_flags", lambda: amx.needs)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    for permitted in (True, False):
        monkeypatch.setattr(build, "may_use_tiles", lambda permitted=permitted: permitted)
        assert (build.available()[0].name == "avx512_amx") is permitted


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY / "kernels")}
    return subprocess.run(
        [sys.executable, "-m", "mtpserve_kernels.cpu.build", *arguments], env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("compiles", [True, False])
def test_the_command_says_what_it_compiles_and_how_long_it_took(compiles: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = fake_compiler(tmp_path, WRITES if compiles else "exit 1", monkeypatch)
    kind = [isa for isa in build.INSTRUCTION_SETS if isa.machine == platform.machine()]
    done = command("--all", str(tmp_path / "objects"))
    lines = done.stdout.splitlines()
    begun = [f"compiling the CPU kernels for {isa.name} with {compiler}: {build.USUAL_TIME}" for isa in kind]
    if not kind:
        assert lines == ["No CPU kernels: they are not written for this machine. Everything runs on plain torch."]
    elif compiles:
        assert done.returncode == 0 and lines[::2] == begun and len(kind) == len(list((tmp_path / "objects").iterdir()))
        assert all(
            re.fullmatch(rf"compiled the CPU kernels for {isa.name} in \d+ s: .+\.so", line)
            for isa, line in zip(kind, lines[1::2], strict=True)
        )
    else:
        assert done.returncode == 1 and lines[0] == begun[0] and len(lines) == 2
        assert "failed: exit status 1. Everything runs on plain torch." in lines[1]


def test_the_command_compiles_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not (here := build.available()):
        pytest.skip("the kernels are not written for this machine")
    fake_compiler(tmp_path, WRITES, monkeypatch)
    ready = f"the CPU kernels for {here[0].name} are ready"
    first, second = command().stdout.splitlines(), command().stdout.splitlines()
    assert first[-1] == ready and len(first) == 3 and second == [ready]


def test_a_server_logs_that_it_compiles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fake_compiler(tmp_path, WRITES, monkeypatch)
    monkeypatch.setattr(library, "available", lambda: [ISA])
    with caplog.at_level("INFO"):
        unavailable()  # what is written is no object
    said = [record.getMessage().split(" with ")[0].split(" in ")[0] for record in caplog.records]
    assert said == ["compiling the CPU kernels for made-up", "compiled the CPU kernels for made-up"]


def test_ldflags_go_to_the_linker_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_compiler(tmp_path, f'echo "$@" >> {tmp_path}/commands\n{WRITES}', monkeypatch)
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    (tmp_path / "one.cpp").touch()
    before = build.source_hash(ISA)
    monkeypatch.setenv("LDFLAGS", "older.o -Wl,--strip-all")
    assert build.source_hash(ISA) == before
    build.compile_to(tmp_path / "target.so", ISA)
    compiled, linked = (tmp_path / "commands").read_text().splitlines()
    assert "-c" in compiled.split() and "--strip-all" not in compiled
    assert "-shared" in linked.split() and "older.o -Wl,--strip-all -o" in linked


def test_a_wheel_has_sources_and_objects(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    shutil.copytree(REPOSITORY / "kernels", tree / "kernels", ignore=shutil.ignore_patterns("__pycache__", "objects"))
    (tree / "mtpserve").mkdir()
    shutil.copy(REPOSITORY / "mtpserve" / "__init__.py", tree / "mtpserve")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, tree)
    objects = tree / "kernels" / "mtpserve_kernels" / "cpu" / "objects"
    objects.mkdir()
    (objects / "made-up.so").write_bytes(b"\x7fELF" + bytes(14) + b"\xb7\x00")  # an object for ARM, by its head
    made = "from setuptools import build_meta; build_meta.build_wheel('.')"
    done = subprocess.run([sys.executable, "-c", made], cwd=tree, capture_output=True, text=True, check=False)
    if "No module named 'setuptools'" in done.stderr:
        pytest.skip("setuptools is not installed")
    assert done.returncode == 0, done.stderr[-2000:]
    with zipfile.ZipFile(next(tree.glob("*-py3-none-linux_aarch64.whl"))) as wheel:
        names = set(wheel.namelist())
    expected = {f"mtpserve_kernels/cpu/src/{path.name}" for path in (*build.sources("*.h"), *build.sources("*.cpp"))}
    assert expected | {"mtpserve_kernels/cpu/objects/made-up.so"} <= names
