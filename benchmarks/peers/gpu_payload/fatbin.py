"""Takes GPU code out of a shared library: that of other architectures, and kernels whose names are not wanted. Nothing is compiled.

    python benchmarks/peers/gpu_payload/fatbin.py LIBRARY        what is inside, by kind and architecture

A library has many fat binaries. Each is a header and entries, one after the other:

    header    magic 4 B | version 2 | header size 2 (16) | size of all entries 8
    entry     kind 2 (1 PTX, 2 machine code) | version 2 | header size 4 | payload size 8 | … | architecture 4 at 28 | … | flags 8 at 40

The code that registers fat binaries points to their beginnings, so these stay where they are. Entries that stay move to the front, the
size is corrected, and the rest becomes zeros, which compress to nothing. A fat binary with no entry left gets a small entry of another
architecture: its kernels fail with "no kernel image is available", as on a GPU that they were not built for. The format is NVIDIA's own
and not documented: the layout was read from libraries of CUDA 13.
"""

from __future__ import annotations

import argparse
import re
import struct
import subprocess
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

HEADER = struct.Struct("<IHHQ")
MAGIC = HEADER.pack(0xBA55ED50, 1, HEADER.size, 0)[:8]
PTX, MACHINE_CODE = 1, 2
KINDS = {PTX: "ptx", MACHINE_CODE: "machine code"}
LEAST_ENTRY = 64  # bytes of an entry's header
# cutlass' kernels that compute attention have it in their names; others, which schedule and combine, stay.
MAINLOOP = "CollectiveMainloop"


@dataclass(frozen=True, slots=True)
class Entry:
    """`begin`: its place in the library."""

    begin: int
    header_size: int
    payload_size: int
    kind: int
    arch: int
    flags: int

    @property
    def end(self) -> int:
        return self.begin + self.header_size + self.payload_size


@dataclass(frozen=True, slots=True)
class FatBinary:
    """[begin, end) in the library, header included."""

    begin: int
    end: int
    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class SlimReport:
    """Bytes of machine code that stayed, bytes that went, fat binaries, and those of them with nothing left."""

    size: int
    kept_bytes: int
    dropped_bytes: int
    num_binaries: int
    num_emptied: int

    def __str__(self) -> str:
        size, kept_mib, dropped_mib = (number / 2**20 for number in (self.size, self.kept_bytes, self.dropped_bytes))
        counts = f"{self.num_binaries} fat binaries, {self.num_emptied} emptied"
        return f"{size:6.1f} MiB, GPU code kept {kept_mib:6.2f}, dropped {dropped_mib:7.2f}; {counts}"


def fat_binaries(data: bytes | bytearray) -> Iterator[FatBinary]:
    """Raises ValueError for what is no entry."""
    begin = data.find(MAGIC)
    while begin >= 0:
        end = begin + HEADER.size + HEADER.unpack_from(data, begin)[3]
        at, entries = begin + HEADER.size, list[Entry]()
        while at + LEAST_ENTRY <= end <= len(data):
            kind, _, header_size, payload_size = struct.unpack_from("<HHIQ", data, at)
            (arch,), (flags,) = struct.unpack_from("<I", data, at + 28), struct.unpack_from("<Q", data, at + 40)
            entry = Entry(at, header_size, payload_size, kind, arch, flags)
            if kind not in KINDS or header_size < LEAST_ENTRY or entry.end > end:
                raise ValueError(f"no entry of a fat binary at {at:#x}")
            entries.append(entry)
            at = entry.end
        yield FatBinary(begin, end, tuple(entries))
        begin = data.find(MAGIC, end)


def kernel_names(machine_code: bytes) -> list[str]:
    """Demangled, from the names of the ELF's text sections. Raises ValueError where it is compressed. Needs c++filt."""
    if machine_code[:4] != b"\x7fELF":
        raise ValueError("names of kernels cannot be read from compressed machine code")
    (offset,), (size, number, strings) = struct.unpack_from("<Q", machine_code, 0x28), struct.unpack_from("<HHH", machine_code, 0x3A)
    # Of a section's header: name, type, flags, address, offset, size.
    sections = [struct.unpack_from("<IIQQQQ", machine_code, offset + i * size) for i in range(number)]
    table = machine_code[sections[strings][4] :][: sections[strings][5]]
    names = [table[section[0] : table.index(b"\0", section[0])].decode() for section in sections]
    mangled = "\n".join(name.removeprefix(".text.") for name in names if name.startswith(".text."))
    return subprocess.run(["c++filt"], input=mangled, capture_output=True, text=True, check=True).stdout.splitlines()


def has_kernel(machine_code: bytes, pattern: str) -> bool:
    mainloops = [name for name in kernel_names(machine_code) if MAINLOOP in name]
    return not mainloops or any(re.search(pattern, name) for name in mainloops)


def smallest_other(data: bytes, archs: Collection[int]) -> bytes:
    """The smallest entry of machine code of none of `archs`, whole. Raises ValueError if there is none."""
    entries = (entry for binary in fat_binaries(data) for entry in binary.entries)
    others = [entry for entry in entries if entry.kind == MACHINE_CODE and entry.arch not in archs]
    if not others:
        raise ValueError(f"no machine code for architectures other than {', '.join(map(str, archs))}")
    entry = min(others, key=lambda entry: entry.payload_size)
    return data[entry.begin : entry.end]


def slim(data: bytearray, archs: Collection[int], pattern: str | None, placeholder: bytes) -> SlimReport:
    """In place, of the same length. Of machine code for `archs` that stays which has a wanted kernel, where there is a `pattern`."""
    kept_bytes = dropped_bytes = num_emptied = 0
    binaries = list(fat_binaries(data))
    for binary in binaries:
        entries = list[bytes]()
        for entry in binary.entries:
            payload = bytes(data[entry.begin + entry.header_size : entry.end])
            if entry.kind == MACHINE_CODE and entry.arch in archs and (pattern is None or has_kernel(payload, pattern)):
                entries.append(bytes(data[entry.begin : entry.end]))
                kept_bytes += entry.payload_size
            else:
                dropped_bytes += entry.payload_size
        room = binary.end - binary.begin - HEADER.size
        if not entries:
            num_emptied += 1
            entries = [placeholder] if len(placeholder) <= room else []
        content = b"".join(entries)
        data[binary.begin + 8 : binary.begin + HEADER.size] = struct.pack("<Q", len(content))
        data[binary.begin + HEADER.size : binary.end] = content + bytes(room - len(content))
    return SlimReport(len(data), kept_bytes, dropped_bytes, len(binaries), num_emptied)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", type=Path)
    sizes = Counter[tuple[str, int, str]]()
    for binary in fat_binaries(parser.parse_args().library.read_bytes()):
        for entry in binary.entries:
            sizes[KINDS[entry.kind], entry.arch, hex(entry.flags)] += entry.payload_size
    for key, size in sorted(sizes.items()):
        print(f"{size / 2**20:8.2f} MiB", *key)


if __name__ == "__main__":
    main()
