"""Pages of several files as one answer, which loads nothing from elsewhere. Their own script and style are
the only ones that a browser may run on them: the policy names them by their hashes."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

from starlette.responses import Response

FILES = Path(__file__).parent / "files"


def content(name: str) -> str:
    """The file's, with that of each file that it, or such a file, names as {{name}}."""
    return re.sub(r"\{\{([\w.]+)\}\}", lambda named: content(named[1]), (FILES / name).read_text("utf-8"))


class Page:
    """`name`: its file, which names the others."""

    def __init__(self, name: str) -> None:
        self.html = content(name).encode()
        self.headers = {
            "Content-Security-Policy": f"default-src 'none'; script-src {self._hashes('script')}; style-src "
            f"{self._hashes('style')}; "
            "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
            # No string becomes markup, whatever code asks for it.
            "require-trusted-types-for 'script'",
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-cache",
        }

    def _hashes(self, tag: str) -> str:
        tags = re.findall(rf"<{tag}>(.*?)</{tag}>".encode(), self.html, re.DOTALL)
        return " ".join(
            f"'sha256-{base64.b64encode(hashlib.sha256(inside).digest()).decode()}'" for inside in tags
        )

    def response(self, status: int = 200) -> Response:
        return Response(self.html, status, self.headers, "text/html; charset=utf-8")
