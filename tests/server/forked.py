"""The server with a fake engine in a process that is forked from one with all imports behind it: these take two thirds of a start."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread
from time import monotonic
from typing import Any

from tests.server import fake_engine

ROOT = Path(__file__).parents[2]
PRELOADED = ["tests.server.forked", "mtpserve.server.launch", "mtpserve.server.app", "mtpserve.text.tokenizer"]


@cache
def context() -> Any:
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(PRELOADED)
    return found


def serve(arguments: Sequence[str], environment: Mapping[str, str], stdout: Connection, stderr: Connection) -> None:
    """In the forked process."""
    os.dup2(stdout.fileno(), 1)
    os.dup2(stderr.fileno(), 2)
    stdout.close()
    stderr.close()
    os.chdir(ROOT)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["fake_engine", *arguments]
    sys.exit(fake_engine.main())


class Forked:
    """As subprocess.Popen, with pipes for standard output and error."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        (out, stdout), (err, stderr) = (context().Pipe(duplex=False) for _ in range(2))
        self.stdout, self.stderr = (os.fdopen(os.dup(end.fileno())) for end in (out, err))
        self._process = context().Process(target=serve, args=(arguments, dict(environment), stdout, stderr))
        self._process.start()
        for end in (out, err, stdout, stderr):
            end.close()
        self.pid: int = self._process.pid

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *error: object) -> None:
        self.stdout.close()
        self.stderr.close()
        self.wait()

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        code: int | None = self._process.exitcode
        return code

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired("fake_engine", timeout or 0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float) -> tuple[str, str]:
        """What is left of both outputs, once everybody has closed them."""
        until, texts = monotonic() + timeout, ["", ""]

        def read(number: int) -> None:
            texts[number] = (self.stdout, self.stderr)[number].read()

        readers = [Thread(target=read, args=(number,), daemon=True) for number in (0, 1)]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(max(until - monotonic(), 0))
            if reader.is_alive():
                raise subprocess.TimeoutExpired("fake_engine", timeout)
        self.wait(max(until - monotonic(), 0.1))
        return texts[0], texts[1]
