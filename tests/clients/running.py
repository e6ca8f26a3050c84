"""Runs a client against a scripted model: its files, its command, and what it asked the server."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.clients.known import Client

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Served:
    url: str
    log: Path

    def requests(self) -> list[dict[str, Any]]:
        """Those that ask the model, in order: each with path, status and body."""
        lines = [json.loads(line) for line in self.log.read_text().splitlines()] if self.log.exists() else []
        return [line for line in lines if line["method"] == "POST"]


@contextmanager
def serve(texts: Sequence[str], place: Path) -> Iterator[Served]:
    log = place / "requests.jsonl"
    command = [sys.executable, "-m", "tests.clients.scripted", str(log), *texts]
    errors = (place / "errors.txt").open("w")
    with errors, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT) as process:
        try:
            assert process.stdout is not None
            yield Served(f"http://127.0.0.1:{process.stdout.readline().strip()}", log)
        finally:
            process.terminate()  # in its time: it writes the log
    assert not (said := (place / "errors.txt").read_text()), said[-2000:]


def png() -> bytes:
    """A picture of 64 x 64 red pixels."""
    rows = (b"\0" + b"\xff\0\0" * 64) * 64
    chunks = ((b"IHDR", struct.pack(">IIBBBBB", 64, 64, 8, 2, 0, 0, 0)), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )


@dataclass(frozen=True)
class Installed:
    """What the clients run with."""

    path: Sequence[Path]  # folders of programs
    modules: Path  # node's


def run(client: Client, installed: Installed, url: str, place: Path) -> tuple[int, str]:
    """Its exit code and what it says, in a directory of its own and with no settings but these."""

    def filled(text: str) -> str:
        return text.replace("@URL", url).replace("@HOME", str(place))

    work = place / "work"
    work.mkdir(exist_ok=True)
    (work / "node_modules").symlink_to(installed.modules)
    (work / "red.png").write_bytes(png())
    for name, content in client.files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(filled(content))
    environment = {"PATH": os.pathsep.join([*map(str, installed.path), os.defpath]), "HOME": str(place)}
    environment |= {name: filled(value) for name, value in client.variables.items()}
    done = subprocess.run(
        [filled(part) for part in client.command], cwd=work, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=240, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr
