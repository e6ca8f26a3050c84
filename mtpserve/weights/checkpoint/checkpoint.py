"""A directory of safetensors files, or one GGUF file: all headers are read when it is opened, each tensor
when it is asked for.

Independent of models. Format: https://github.com/huggingface/safetensors#format, checked here by hand, so
that a truncated or half-downloaded file is reported within milliseconds and in plain words. GGUF is read by
gguf.py.

    | header length: 8 bytes | header: JSON, name → dtype, shape, data_offsets | data ... |
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from mtpserve.core.errors import LoadError
from mtpserve.core.gguf import SUFFIX
from mtpserve.weights.checkpoint.tensor_entry import TensorEntry

if TYPE_CHECKING:
    from torch import Tensor

INDEX = "model.safetensors.index.json"
MAX_HEADER = 100_000_000  # the format's own limit
BITS = {
    "F64": 64,
    "F32": 32,
    "F16": 16,
    "BF16": 16,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "F4": 4,
}
BITS |= {
    "I64": 64,
    "I32": 32,
    "I16": 16,
    "I8": 8,
    "U64": 64,
    "U32": 32,
    "U16": 16,
    "U8": 8,
    "BOOL": 8,
    "C64": 64,
}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    directory: Path
    tensors: dict[str, TensorEntry]
    handles: dict[Path, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def open(cls, directory: str | Path) -> Checkpoint:
        """Reads the index, if there is one, and every file's header. Raises LoadError naming the file and the
        tensor."""
        directory = Path(directory)
        if directory.suffix == SUFFIX:
            from mtpserve.weights.checkpoint.gguf import gguf_entries

            return cls(directory, dict(gguf_entries(directory)))
        if not directory.is_dir():
            raise LoadError(
                f"{directory}: no such directory; a checkpoint is a directory with config.json and "
                f"*.safetensors"
            )
        index = directory / INDEX
        return cls(directory, _indexed(index) if index.is_file() else _all_files(directory))

    def tensor(self, name: str) -> Tensor:
        """Returns a tensor on the CPU, memory-mapped from the file and read on first access. Do not write to
        it; copy it. What GGUF quantises is float32."""
        from safetensors import SafetensorError

        file = self.tensors[name].file
        try:
            if file not in self.handles:
                self.handles[file] = self._opened(file)
            tensor: Tensor = self.handles[file].get_tensor(name)
            return tensor
        except (SafetensorError, OSError) as error:
            raise LoadError(f"{file}: {name} cannot be read: {error}") from error

    def unlisted(self) -> dict[str, TensorEntry]:
        """The tensors in the directory's files that are not among `tensors`: an index does not name them, or
        there is a model.safetensors beside their file. Files that cannot be read are left out."""
        entries: dict[str, TensorEntry] = {}
        for path in sorted(self.directory.glob("*.safetensors")):
            with suppress(LoadError):
                entries = {**read_header(path), **entries}
        return {name: entry for name, entry in entries.items() if name not in self.tensors}

    def equal(self, name: str, other: str) -> bool:
        """True if two tensors have the same shape and numbers. Reads them, as far as they are the same."""
        if self.tensors[name].shape != self.tensors[other].shape:
            return False
        rows = zip(self.tensor(name).split(4096), self.tensor(other).split(4096), strict=True)
        return all(bool((a == b).all()) for a, b in rows)

    def _opened(self, file: Path) -> Any:
        if file.suffix == SUFFIX:
            from mtpserve.weights.checkpoint.gguf import GGUFFile

            return GGUFFile(file, self.tensors)
        from safetensors import safe_open

        return safe_open(str(file), framework="pt")

    def close(self) -> None:
        """Closes the files; a later `tensor` opens them again."""
        self.handles.clear()


def _indexed(index: Path) -> dict[str, TensorEntry]:
    """The index decides from which file a tensor is taken; tensors that it does not name are ignored."""
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        files = {name: str(shard) for name, shard in weight_map.items()}
    except OSError as error:
        raise LoadError(f"{index}: cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LoadError(f"{index}: is not an index of safetensors files{_looks_like(index)}") from error
    first_of = {shard: name for name, shard in reversed(files.items())}
    shards: dict[str, Mapping[str, TensorEntry]] = {}
    for shard, tensor in sorted(first_of.items()):
        path = index.parent / shard
        if Path(shard).name != shard:
            raise LoadError(f"{index}: {tensor} is listed in {shard!r}, which is not a file name")
        if not path.is_file():
            others = sum(other == shard for other in files.values()) - 1
            raise LoadError(
                f"{path}: this file is missing; {INDEX} names it for {tensor} and {others} other tensors"
            )
        shards[shard] = read_header(path)
    for name, shard in files.items():
        if name not in shards[shard]:
            raise LoadError(
                f"{index.parent / shard}: {name} is missing in this file, although {INDEX} says "
                f"that it is there"
            )
    return {name: shards[shard][name] for name, shard in files.items()}


def _all_files(directory: Path) -> dict[str, TensorEntry]:
    entries: dict[str, TensorEntry] = {}
    single = directory / "model.safetensors"
    paths = [single] if single.is_file() else sorted(directory.glob("*.safetensors"))
    for path in paths:
        for name, entry in read_header(path).items():
            if name in entries:
                raise LoadError(
                    f"{path}: {name} is also in {entries[name].file.name}, and there is no {INDEX} "
                    f"that says which one counts"
                )
            entries[name] = entry
    if paths:
        return entries
    pickles = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in directory.glob(pattern))
    if pickles:
        raise LoadError(
            f"{directory}: only pickled weights here ({pickles[0]}), which can run code when "
            f"loaded: convert to safetensors"
        )
    raise LoadError(f"{directory}: no *.safetensors file in this directory")


def read_header(path: Path) -> Mapping[str, TensorEntry]:
    """Names, dtypes and offsets of a file's tensors, checked against its length. Raises LoadError."""
    try:
        file_stat = path.stat()
        return _header(path, file_stat.st_size, file_stat.st_mtime_ns, file_stat.st_ino)
    except OSError as error:
        raise LoadError(f"{path}: cannot be read: {error.strerror}") from error


# a plan is made several times, and large models' headers, of 90,000 tensors, take seconds to read
@lru_cache(maxsize=1024)
def _header(path: Path, size: int, changed: int, inode: int) -> Mapping[str, TensorEntry]:
    """`changed`, `inode`: so that a file that was written anew is read anew."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or not 2 <= length <= min(MAX_HEADER, size - 8):
                raise LoadError(
                    f"{path}: is not a safetensors file, or a truncated one ({size} bytes){_looks_like(path)}"
                )
            header = json.loads(file.read(length))
    except ValueError as error:
        raise LoadError(
            f"{path}: is not a safetensors file: its header is not valid JSON{_looks_like(path)}"
        ) from error
    if not isinstance(header, dict):
        raise LoadError(f"{path}: is not a safetensors file: its header is not a JSON object")
    entries = {name: _entry(path, name, value) for name, value in header.items() if name != "__metadata__"}
    _check_layout(path, entries.items(), size - 8 - length)
    return MappingProxyType(
        {name: replace(entry, start=8 + length + entry.start) for name, entry in entries.items()}
    )


def _entry(path: Path, name: str, value: Any) -> TensorEntry:
    try:
        dtype, shape, (start, end) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
        if not all(type(number) is int and number >= 0 for number in (*shape, start, end)):
            raise ValueError("not numbers of elements and bytes")
    except (KeyError, TypeError, ValueError) as error:
        raise LoadError(f"{path}: {name} has a damaged header entry") from error
    if dtype not in BITS:
        raise LoadError(f"{path}: {name} has the unknown dtype {dtype!r}; known: {', '.join(BITS)}")
    if math.prod(shape) * BITS[dtype] != (end - start) * 8:
        raise LoadError(
            f"{path}: {name} of shape {list(shape)} and dtype {dtype} cannot take {end - start} bytes"
        )
    return TensorEntry(path, dtype, shape, start, end - start)


def _check_layout(path: Path, entries: Iterable[tuple[str, TensorEntry]], available: int) -> None:
    """Raises LoadError unless the tensors fill the data section without gaps."""
    position = 0
    for name, entry in sorted(entries, key=lambda item: (item[1].start, item[1].size)):
        if entry.start != position:
            raise LoadError(
                f"{path}: {name} starts at byte {entry.start} of the data, the tensor before it "
                f"ends at {position}"
            )
        position += entry.size
        if position > available:
            raise LoadError(
                f"{path}: is truncated: {name} ends at byte {position} of the data, the file has "
                f"only {available}"
            )
    if position != available:
        raise LoadError(
            f"{path}: {available - position} bytes follow after the last tensor; the file is damaged"
        )


def _looks_like(path: Path) -> str:
    """A hint, for a file that is not what its name says."""
    with path.open("rb") as file:
        start = file.read(64).lstrip().lower()
    if start.startswith(b"version https://git-lfs"):
        return ": it is a Git LFS pointer; run `git lfs pull` to fetch the file itself"
    if start.startswith((b"<!doctype", b"<html", b"<?xml")):
        return ": it is a web page, a download that went wrong; fetch the file again"
    return ""
