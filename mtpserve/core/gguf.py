"""A GGUF file's header: its metadata, and where its tensors are. Reads no weights: weights/checkpoint/gguf.py
does, and text/gguf.py the tokenizer.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, read by hand, so that a damaged file is
reported in plain words and a vocabulary, which takes seconds with the format's own package, is only read
where it is used.

    | GGUF | version | number of tensors, of entries | entries | tensors | data ... |
    entry    key, type, value
    tensor   name, shape, type, offset
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, TypeVar

from mtpserve.core.errors import LoadError

T = TypeVar("T")
SUFFIX = ".gguf"
VERSIONS = (2, 3)
# GGUF's types as struct writes them
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
MAX_DIMS = 4
NEEDED: Any = object()  # the default of a key that must be present
KINDS = {int: "an integer", float: "a number", str: "a string", bool: "true or false"}


@dataclass(frozen=True, slots=True)
class GGUFArray:
    """An array in the metadata: `kind` is its elements' type, `start` the first one's place in the file. Read
    by GGUFHeader.array."""

    kind: int
    count: int
    start: int


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """`shape` in torch's order, rows first; `kind` is GGUF's number of the type; `start` is its first byte in
    the file."""

    name: str
    shape: tuple[int, ...]
    kind: int
    start: int


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """`size`: of the file, in bytes."""

    path: Path
    metadata: dict[str, bool | int | float | str | GGUFArray]
    tensors: tuple[GGUFTensor, ...]
    size: int

    @classmethod
    def read(cls, path: str | Path) -> GGUFHeader:
        """Raises LoadError naming the file."""
        path = Path(path)
        try:
            with path.open("rb") as file:
                size, start = path.stat().st_size, file.read(8)
                if start[:4] != b"GGUF":
                    raise LoadError(f"{path}: is not a GGUF file ({size} bytes)")
                if size < 24 or (version := int.from_bytes(start[4:], "little")) not in VERSIONS:
                    what = f"has version {version}" if size >= 24 else f"is truncated: it has {size} bytes"
                    raise LoadError(
                        f"{path}: {what}; GGUF of versions {VERSIONS} can be read, with the lowest byte first"
                    )
                with mmap(file.fileno(), 0, access=ACCESS_READ) as data:
                    return _parsed(path, GGUFReader(data, 8), size)
        except OSError as error:
            raise LoadError(f"{path}: cannot be read: {error.strerror}") from error
        except (struct.error, OverflowError) as error:
            raise LoadError(f"{path}: is truncated: its header goes on after its {size} bytes") from error
        except UnicodeDecodeError as error:
            raise LoadError(f"{path}: is damaged: a name in its header is not UTF-8") from error

    def has(self, key: str) -> bool:
        return key in self.metadata

    def get(self, key: str, kind: type[T], default: T = NEEDED) -> T:
        """Raises LoadError where the key is missing and has no default, or its value is not of this kind."""
        value: Any = self.metadata.get(key, default)
        if value is NEEDED:
            raise LoadError(f"{self.path}: {key} is missing; it must be {KINDS[kind]}")
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind and value is not default:
            description = "an array" if isinstance(value, GGUFArray) else repr(value)
            raise LoadError(f"{self.path}: {key} must be {KINDS[kind]}, got {description}")
        result: T = value
        return result

    def array(self, key: str) -> list[Any]:
        """Its strings or numbers; an empty list without this key. Raises LoadError where the key is not an
        array."""
        value = self.metadata.get(key)
        if value is None:
            return []
        if not isinstance(value, GGUFArray):
            raise LoadError(f"{self.path}: {key} must be an array, got {value!r}")
        with self.path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as data:
            reader = GGUFReader(data, value.start)
            try:
                return (
                    [reader.text() for _ in range(value.count)]
                    if value.kind == STRING
                    else reader.numbers(value.kind, value.count)
                )
            except UnicodeDecodeError as error:
                raise LoadError(f"{self.path}: {key} has a string that is not UTF-8") from error


@dataclass(slots=True)
class GGUFReader:
    """Reads value after value. Raises struct.error at the file's end."""

    data: mmap
    at: int

    def number(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += struct.calcsize("<" + code)
        return value

    def numbers(self, kind: int, count: int) -> list[Any]:
        layout = f"<{count}{SCALARS[kind]}"
        values = struct.unpack_from(layout, self.data, self.at)
        self.at += struct.calcsize(layout)
        return list(values)

    def text(self) -> str:
        length: int = self.number("Q")
        if self.at + length > len(self.data):
            raise struct.error("a string goes on after the end")
        self.at += length
        return self.data[self.at - length : self.at].decode()

    def skip_texts(self, count: int) -> None:
        at, data, unpack = self.at, self.data, struct.Struct("<Q").unpack_from
        for _ in range(count):
            at += 8 + unpack(data, at)[0]
        self.at = at

    def value(self, kind: int, key: str, path: Path) -> bool | int | float | str | GGUFArray:
        if kind == STRING:
            return self.text()
        if kind in SCALARS:
            scalar: bool | int | float = self.number(SCALARS[kind])
            return scalar
        if kind != ARRAY:
            raise LoadError(f"{path}: {key} has the unknown type {kind}")
        array = GGUFArray(self.number("I"), self.number("Q"), self.at)
        if array.kind == STRING:
            self.skip_texts(array.count)
        elif array.kind in SCALARS:
            self.at += array.count * struct.calcsize("<" + SCALARS[array.kind])
        else:
            raise LoadError(f"{path}: {key} is an array of the unknown type {array.kind}")
        if self.at > len(self.data):
            raise struct.error("an array goes on after the end")
        return array


def _parsed(path: Path, reader: GGUFReader, size: int) -> GGUFHeader:
    tensors, entries = reader.number("Q"), reader.number("Q")
    metadata: dict[str, bool | int | float | str | GGUFArray] = {}
    for _ in range(entries):
        key = reader.text()
        metadata[key] = reader.value(reader.number("I"), key, path)
    places: dict[str, tuple[tuple[int, ...], int, int]] = {}
    for _ in range(tensors):
        name, dims = reader.text(), reader.number("I")
        if dims > MAX_DIMS or name in places:
            raise LoadError(f"{path}: is damaged: {name!r} has {dims} dimensions, or is there twice")
        shape = tuple(reversed([reader.number("Q") for _ in range(dims)]))
        places[name] = (shape, reader.number("I"), reader.number("Q"))
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment <= 0:
        raise LoadError(f"{path}: general.alignment must be a number of bytes, got {alignment!r}")
    data = -(-reader.at // alignment) * alignment
    gguf_tensors = tuple(
        GGUFTensor(name, shape, kind, data + offset) for name, (shape, kind, offset) in places.items()
    )
    return GGUFHeader(path, metadata, gguf_tensors, size)
