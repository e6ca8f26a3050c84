"""What /metrics answers, as tests compare it."""

from __future__ import annotations

import re

MODEL = re.compile(r'\{model_name="[^"]*"\}|model_name="[^"]*",|,model_name="[^"]*"(?=\})')


def without_model(text: str) -> str:
    """Our metrics without the label that all of them have."""
    return re.sub(r"^mtpserve_.*$", lambda line: MODEL.sub("", line[0]), text, flags=re.MULTILINE)
