"""Pages in files, one for each page: found by key, checked when they are read, and bounded in their number of
bytes.

    DIR / fingerprint / first byte of the key / key-group.kv       Header | what the page holds in all layers

Several engines may use one folder. A file is written beside its place and then renamed, so that it is whole
or not there; whatever is wrong with it (damaged, of another model, cut off) makes it a miss, and it is
deleted. The least recently used files are deleted first; only files that look like ours are touched. Times of
files decide what is deleted, and nothing else: a clock that is set back costs hits.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import struct
import threading
import uuid
import zlib
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from mtpserve.cache.keys import Key
from mtpserve.core.errors import ConfigError

log = logging.getLogger(__name__)

MAGIC = b"mtpserve kv 1\n\0\0"
HEADER = struct.Struct("<16s16s16sIIQ")  # magic, fingerprint, key, group, checksum, bytes
SUFFIX = ".kv"
FOLDER = re.compile(r"[0-9a-f]{32}(\.[0-9a-f]{32}\.old)?")  # a model's folder; also one that is being deleted
SCAN_EVERY = 0.05  # share of the bound that may be written before the folder is looked at again


class DiskPages:
    """Pages on disk, for several threads at once. `limit`: bytes of all files in the directory. Raises
    ConfigError for a directory that cannot be written."""

    def __init__(self, directory: str, limit: int, fingerprint: bytes) -> None:
        if len(fingerprint) != 16:
            raise ValueError(f"a fingerprint has 16 bytes, got {len(fingerprint)}")
        self.root, self.limit, self.fingerprint = Path(directory), limit, fingerprint
        self.model_folder = self.root / fingerprint.hex()
        self._folder, self._numbers = os.fspath(self.model_folder), count()
        self._lock = threading.Lock()
        self._warned = False
        try:
            self.model_folder.mkdir(parents=True, exist_ok=True)
            probe = self.model_folder / f"{uuid.uuid4().hex}.tmp"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise ConfigError(f"--kv-offload-dir {directory}: {error.strerror or error}") from error
        self._since_scan = limit  # bytes written since the folder was looked at
        self._make_room(0)

    def path(self, group: int, key: Key) -> str:
        name = key.hex()
        return f"{self._folder}/{name[:2]}/{name}-{group}{SUFFIX}"

    def has(self, group: int, key: Key) -> bool:
        return os.path.exists(self.path(group, key))

    def write(self, group: int, key: Key, content: memoryview) -> bool:
        """False, with one warning for all: it could not be written."""
        path = self.path(group, key)
        beside = f"{path}.{os.getpid()}.{next(self._numbers)}.tmp"
        header = HEADER.pack(MAGIC, self.fingerprint, key, group, zlib.crc32(content), len(content))
        try:
            self._make_room(len(header) + len(content))
            try:
                descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            except FileNotFoundError:
                os.makedirs(os.path.dirname(path), exist_ok=True)
                descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                if os.writev(descriptor, [header, content]) != len(header) + len(content):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # what a full disk takes is a part
            finally:
                os.close(descriptor)
            os.replace(beside, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(beside)
            if not self._warned:
                self._warned = True
                log.warning(
                    "--kv-offload-dir: cannot write a KV page (further failures are not logged): %s", error
                )
            return False
        return True

    def read(self, group: int, key: Key, content: memoryview) -> bool:
        """Into `content`, of which nothing may be used after a miss: False, and the file is gone."""
        path, header = self.path(group, key), bytearray(HEADER.size)
        try:
            descriptor = os.open(path, os.O_RDONLY)
            try:
                is_complete = os.readv(descriptor, [header, content]) == len(header) + len(content)
            finally:
                os.close(descriptor)
            magic, fingerprint, stored_key, number, checksum, size = HEADER.unpack(header)
            meant = (magic, fingerprint, stored_key, number, size) == (
                MAGIC,
                self.fingerprint,
                key,
                group,
                len(content),
            )
            if is_complete and meant and zlib.crc32(content) == checksum:
                with contextlib.suppress(OSError):
                    os.utime(path)  # used just now
                return True
        except FileNotFoundError:
            return False
        except OSError as error:
            log.debug("%s: %s", path, error)
        log.warning(
            "--kv-offload-dir: %s is damaged, or another engine wrote it; its tokens are computed again",
            os.path.basename(path),
        )
        with contextlib.suppress(OSError):
            os.unlink(path)
        return False

    def remove(self, group: int, key: Key) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self.path(group, key))

    def clear(self) -> None:
        """Deletes all pages of this model. What is being read or written meanwhile comes to nothing."""
        aside = self.root / f"{self.fingerprint.hex()}.{uuid.uuid4().hex}.old"
        with contextlib.suppress(OSError):
            os.rename(self.model_folder, aside)
        self.model_folder.mkdir(parents=True, exist_ok=True)
        threading.Thread(target=_delete, args=(aside,), name="clear pages", daemon=True).start()

    def _make_room(self, size: int) -> None:
        """Makes room for a file of so many bytes. Other processes write here, too: now and then all files are
        counted."""
        with self._lock:
            self._since_scan += size
            if self._since_scan < SCAN_EVERY * self.limit:
                return
            self._since_scan = 0
            files = sorted(
                file
                for folder in self.root.iterdir()
                if FOLDER.fullmatch(folder.name)
                for file in _files(folder)
            )
            total = sum(size for _, size, _ in files)
            for _, length, path in files:
                # Room for what comes before the next look.
                if total <= (1 - 2 * SCAN_EVERY) * self.limit:
                    break
                with contextlib.suppress(OSError):
                    path.unlink()
                total -= length


def _files(folder: Path) -> Iterator[tuple[float, int, Path]]:
    """Time of the last use, bytes, and path of each file of ours in a model's folder, with those of engines
    that ended as they wrote."""
    for subfolder in folder.glob("??"):
        with contextlib.suppress(OSError):
            for entry in os.scandir(subfolder):
                if entry.name.endswith((SUFFIX, ".tmp")):
                    with contextlib.suppress(OSError):
                        stat = entry.stat()
                        yield stat.st_mtime, stat.st_size, Path(entry.path)


def _delete(aside: Path) -> None:
    for _, _, path in _files(aside):
        with contextlib.suppress(OSError):
            path.unlink()
    for folder in (*aside.glob("??"), aside):
        with contextlib.suppress(OSError):
            folder.rmdir()
