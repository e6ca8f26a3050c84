"""mtpserve: an inference server for language models in which multi-token prediction is the normal way to
decode."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mtpserve.async_llm import AsyncLLM
    from mtpserve.core.protocols.adapters import LoRARequest
    from mtpserve.core.sampling import SamplingParams
    from mtpserve.llm import LLM
    from mtpserve.text.outputs import Completion

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncLLM", "Completion", "LoRARequest", "SamplingParams", "__version__"]

# Imported when asked for: `import mtpserve` loads no torch.
_HOMES = {
    "LLM": "mtpserve.llm",
    "AsyncLLM": "mtpserve.async_llm",
    "Completion": "mtpserve.text.outputs",
    "LoRARequest": "mtpserve.core.protocols.adapters",
    "SamplingParams": "mtpserve.core.sampling",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'mtpserve' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
