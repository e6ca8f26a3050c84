"""`python -m mtpserve` is `mtpserve`."""

from __future__ import annotations

import sys

from mtpserve.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
