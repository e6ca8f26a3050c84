"""The draft models, by their names in --speculative-algorithm. Each is one file and one line here.

SGLang and vLLM have several names for drafting with the checkpoint's own MTP layer, and EAGLE is one of them
where no head is named. n-grams have no model: see spec/draft/ngram.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mtpserve.core.registry import Registry

if TYPE_CHECKING:
    from mtpserve.core.protocols.models import DraftSource

DRAFTERS: Registry[DraftSource] = Registry(
    "drafter",
    {
        "MTP": "mtpserve.heads.assistant:MTP",
        "NEXTN": "mtpserve.heads.assistant:MTP",
        "EAGLE": "mtpserve.heads.eagle:EAGLE",
        "FROZEN_KV_MTP": "mtpserve.heads.assistant:FROZEN_KV_MTP",
        "EAGLE3": "mtpserve.heads.eagle3:EAGLE3",
        "MEDUSA": "mtpserve.heads.medusa:MEDUSA",
        "DFLASH": "mtpserve.heads.dflash:DFLASH",
        "STANDALONE": "mtpserve.heads.standalone:STANDALONE",
        "DRAFT_MODEL": "mtpserve.heads.standalone:STANDALONE",
    },
)
MTP = "mtp"
OWN_LAYER = ("MTP", "NEXTN", "EAGLE")  # names of the model's own MTP layer, of EAGLE where no head is named


def source_name(drafter: str | None, path: str | None) -> str:
    """Returns the name of a draft model in traces and metrics: `mtp` for the checkpoint's own layer, else the
    first of its algorithm's names. `path`: the draft model's."""
    if drafter is None or DRAFTERS.get(drafter).in_checkpoint(path):
        return MTP
    return next(
        name for name, target in DRAFTERS.entries.items() if target == DRAFTERS.entries[drafter]
    ).lower()


# drafters that are only published apart from the model
SEPARATE = ("FROZEN_KV_MTP", "EAGLE3", "MEDUSA", "DFLASH", "STANDALONE", "DRAFT_MODEL")
BLOCKS = ("DFLASH",)  # drafters that compute a block of drafts in one pass, and store all of its rows

# llama.cpp's --spec-type → --speculative-algorithm. It may name a draft model and n-grams together.
_MODELS = {
    "draft-mtp": "MTP", "draft-eagle3": "EAGLE3", "draft-dflash": "DFLASH", "draft-simple": "STANDALONE",
}  # fmt: skip
_NGRAMS = ("ngram-simple", "ngram-cache", "ngram-map-k", "ngram-map-k4v", "ngram-mod")
SPEC_TYPES = (
    *_MODELS.items(),
    *((ngram, "NGRAM") for ngram in _NGRAMS),
    *((f"{theirs},{ngram}", f"{name}+NGRAM") for theirs, name in _MODELS.items() for ngram in _NGRAMS),
    *((f"{ngram},{theirs}", f"{name}+NGRAM") for theirs, name in _MODELS.items() for ngram in _NGRAMS),
)
