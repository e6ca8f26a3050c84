"""Packs vLLM for a Hopper GPU on a machine that has torch 2.11.0 with CUDA 13 and no network: `python …/gpu_payload/build.py --out FOLDER`.

Nothing is compiled. pip downloads published wheels; shared libraries lose the GPU code of other architectures, and FlashAttention 3 also
that of other head sizes and number formats (fatbin.py). FOLDER gets peers.tar.xz, which run.sh unpacks there. Needs c++filt.
"""

from __future__ import annotations

import argparse
import hashlib
import lzma
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import fatbin

HERE = Path(__file__).parent
ARCHIVE = "peers.tar.xz"
VLLM = "vllm==0.26.0"  # the last release that is pinned to torch 2.11.0
# What vLLM or mtpserve import and that machine lacks.
WHEELS = HERE / "wheels.txt"
TAGS = [f"manylinux_2_{n}_x86_64" for n in (39, 38, 35, 34, 31, 28, 27, 26, 24, 17, 5)] + ["manylinux2014_x86_64", "manylinux1_x86_64"]
ARCHS = (90,)  # Hopper's; sm_90a has the same number
# Bfloat16, heads of 64 and 128, no softcap.
FA3 = r"cute::C<(64|128)> >, \1, cutlass::bfloat16_t, float, cutlass::arch::Sm90, (true|false), (true|false), false,"
BASE = "vllm/_C_stable_libtorch.abi3.so"
# Library → of which kernels' names; all others are left out.
LIBRARIES: dict[str, str | None] = {
    BASE: None,
    "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so": FA3,
    "vllm/cumem_allocator.abi3.so": None,
    "vllm/spinloop.abi3.so": None,
}
MOE: dict[str, str | None] = {"vllm/_moe_C_stable_libtorch.abi3.so": None}
UNUSED_IN_VLLM = re.compile(
    r"vllm/vllm-rs$|vllm/third_party/(deep_gemm|fmha_sm100|tml_fa4)/|vllm/entrypoints/serve/instrumentator/static/|\.(jpg|png)$"
    r"|vllm/vllm_flash_attn/cute/flash_(bwd|fwd_sm1)"
)
UNUSED = re.compile(r"(^|/)tests?/|\.(pyi|c|h|hpp|cpp|cu|cuh)$|dist-info/(RECORD|licenses/)")
# vLLM names xgrammar's classes in annotations when it is imported, and uses it for structured output alone: 15 MiB.
XGRAMMAR = '''"""Stands in for xgrammar: any name is an empty class."""


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})
'''


def download(names: Sequence[str], wheels: Path, python: str) -> list[Path]:
    """Wheels of these requirements alone, in a folder of `wheels` that has no others. Raises SystemExit with pip's words."""
    folder = wheels / hashlib.sha256(" ".join([python, *names]).encode()).hexdigest()[:12]
    folder.mkdir(parents=True, exist_ok=True)
    platforms = [word for tag in TAGS for word in ("--platform", tag)]
    target = ["--python-version", python, "--implementation", "cp", "--only-binary=:all:", "--no-deps"]
    command = [sys.executable, "-m", "pip", "download", "-qq", *target, *platforms, "-d", str(folder), *names]
    process = subprocess.run(command, check=False, capture_output=True, text=True)
    if process.returncode:
        raise SystemExit(
            f"pip could not download {', '.join(names)}: {(process.stderr.strip().splitlines() or ['no error was shown'])[-1]}"
        )
    return sorted(folder.glob("*.whl"))


def unpack(wheel: Path, site: Path, libraries: dict[str, str | None]) -> None:
    is_vllm = wheel.name.startswith("vllm-")
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            is_unused = is_vllm and (UNUSED_IN_VLLM.search(name) or (name.endswith(".so") and name not in libraries))
            if not is_unused and not UNUSED.search(name):
                archive.extract(name, site)


def slim_libraries(site: Path, libraries: dict[str, str | None]) -> None:
    placeholder = fatbin.smallest_other((site / BASE).read_bytes(), ARCHS)
    for name, pattern in libraries.items():
        data = bytearray((site / name).read_bytes())
        report = fatbin.slim(data, ARCHS, pattern, placeholder)
        (site / name).write_bytes(data)
        print(f"{name:44} {report}", flush=True)


def pack(site: Path, archive: Path) -> None:
    filters = [{"id": lzma.FILTER_X86}, {"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 64 << 20}]
    with lzma.open(archive, "wb", filters=filters) as stream, tarfile.open(fileobj=stream, mode="w") as tar:
        tar.add(site, "site", filter=lambda item: None if "__pycache__" in item.name else item)
    size = sum(file.stat().st_size for file in site.rglob("*") if file.is_file())
    print(f"{archive}: {archive.stat().st_size / 2**20:.1f} MiB, {size / 2**20:.0f} MiB unpacked")


def split(archive: Path, size: int) -> list[Path]:
    """The archive in parts of `size` bytes, peers.tar.xz.00 and so on, in its place."""
    data, parts = archive.read_bytes(), list[Path]()
    archive.unlink()
    for number, begin in enumerate(range(0, len(data), size)):
        parts.append(archive.with_name(f"{archive.name}.{number:02}"))
        parts[-1].write_bytes(data[begin : begin + size])
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    downloads = Path(tempfile.gettempdir()) / "mtpserve-peers-wheels"
    help_of_wheels = "where downloads stay for the next time (default: %(default)s)"
    parser.add_argument("--wheels", type=Path, default=downloads, metavar="FOLDER", help=help_of_wheels)
    parser.add_argument("--python", default="3.12", metavar="VERSION", help="of that machine (default: %(default)s)")
    parser.add_argument("--moe", action="store_true", help="with vLLM's kernels for mixtures of experts")
    parser.add_argument("--part", type=float, metavar="MIB", help="split the archive into parts of this size")
    args = parser.parse_args()
    if args.part is not None and args.part <= 0:
        parser.error(f"--part must be more than 0 MiB, got {args.part:g}")
    if shutil.which("c++filt") is None:
        parser.error("c++filt is not installed: it reads kernels' names (Debian's package binutils)")
    libraries = LIBRARIES | (MOE if args.moe else {})
    args.out.mkdir(parents=True, exist_ok=True)
    for file in args.out.glob(f"{ARCHIVE}*"):
        file.unlink()
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder) / "site"
        for wheel in download([VLLM, *WHEELS.read_text(encoding="utf-8").split()], args.wheels, args.python):
            unpack(wheel, site, libraries)
        (site / "xgrammar").mkdir()
        (site / "xgrammar" / "__init__.py").write_text(XGRAMMAR, encoding="utf-8")
        slim_libraries(site, libraries)
        pack(site, args.out / ARCHIVE)
    if args.part is not None:
        print(*split(args.out / ARCHIVE, int(args.part * 2**20)), sep="\n")


if __name__ == "__main__":
    main()
