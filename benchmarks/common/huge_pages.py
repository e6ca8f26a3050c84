"""Engines in the benchmark's own process have their weights where the server's have them."""

from __future__ import annotations

import os
import sys

from mtpserve.engine.process.client import HUGE_PAGES


def on_huge_pages() -> None:
    """Begins the program again, as malloc reads these settings once."""
    if not HUGE_PAGES.keys() & os.environ.keys():
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | HUGE_PAGES)
