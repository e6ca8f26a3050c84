"""The draft models, by their names in --speculative-algorithm. Each is one file and one line here.

SGLang and vLLM have several names for drafting with the checkpoint's own MTP layer. n-grams have no model: see spec/ngram.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mtpserve.core.registry import Registry

if TYPE_CHECKING:
    from mtpserve.core.protocols import DraftSource

DRAFTERS: Registry[DraftSource] = Registry(
    "drafter",
    {
        "MTP": "mtpserve.spec.mtp:MTP",
        "NEXTN": "mtpserve.spec.mtp:MTP",
        "EAGLE": "mtpserve.spec.mtp:MTP",
    },
)
