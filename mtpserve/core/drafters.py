"""The drafters that have a model, by the names that --speculative-algorithm takes. One file and one line each.

Peers call drafting with the checkpoint's own MTP layer by several names. n-grams have no model: see spec/ngram.
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
