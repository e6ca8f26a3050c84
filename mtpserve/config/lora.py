"""Low-rank adapters that are served beside the model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtpserve.config.options import check, option
from mtpserve.core.errors import ConfigError
from mtpserve.core.protocols.adapters import LoRARequest

MAX_RANK = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class LoRAConfig:
    enable_lora: bool = option(
        False,
        "serve LoRA adapters: room for them is reserved, and they can be loaded while the server runs "
        "(default: only with --lora-modules)",
    )
    lora_modules: tuple[str, ...] = option(
        (),
        "adapters that are loaded at start: name=path, a path alone, or JSON as "
        '{"name": "sql", "path": "adapters/sql"}. Requests name one as their model',
        "lora-paths",
    )
    max_loras: int = option(
        4,
        "adapters in one batch. More of them may be loaded: the least recently used one gives way",
        "max-loras-per-batch",
    )
    max_lora_rank: int = option(
        16, f"the largest rank of an adapter, up to {MAX_RANK}: memory is reserved for it"
    )

    def __post_init__(self) -> None:
        check(self.max_loras >= 1, "max_loras", self.max_loras, "at least 1")
        check(
            1 <= self.max_lora_rank <= MAX_RANK, "max_lora_rank", self.max_lora_rank, f"from 1 to {MAX_RANK}"
        )
        check(isinstance(self.lora_modules, tuple), "lora_modules", self.lora_modules, "a tuple of names")
        names = [request.lora_name for request in self.requests]
        for name in names:
            check(names.count(name) == 1, "lora_modules", name, "names that differ")

    @property
    def is_enabled(self) -> bool:
        return self.enable_lora or bool(self.lora_modules)

    @property
    def requests(self) -> tuple[LoRARequest, ...]:
        """The adapters of the start, numbered from 1. Raises ConfigError."""
        named = map(name_and_path, self.lora_modules)
        return tuple(LoRARequest(name, number, path) for number, (name, path) in enumerate(named, 1))


def name_and_path(text: str) -> tuple[str, str]:
    """Reads what vLLM and SGLang write. Raises ConfigError."""
    name, _, path = text.rpartition("=")
    if text.lstrip().startswith("{"):
        values = parsed(text)
        name = values.get("name", values.get("lora_name", ""))
        path = values.get("path", values.get("lora_path", ""))
    elif not name:
        name = Path(path).name
    if not (isinstance(name, str) and isinstance(path, str) and name and path):
        raise ConfigError(f'--lora-modules must be name=path, or JSON with "name" and "path", got {text!r}')
    return name, path


def parsed(text: str) -> dict[str, Any]:
    try:
        values = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--lora-modules: {text!r} is no JSON: {error}") from None
    return dict(values) if isinstance(values, dict) else {}
