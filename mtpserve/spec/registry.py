"""The drafters by name. NEXTN and EAGLE are peers' names for what MTP does with a checkpoint's own layer."""

from mtpserve.core.registry import Registry

DRAFTERS = Registry(
    "drafter",
    {
        "none": "mtpserve.spec.null:NullDrafter",
        "mtp": "mtpserve.spec.mtp:MTPDrafter",
        "tree": "mtpserve.spec.tree:MTPTreeDrafter",
        "ngram": "mtpserve.spec.ngram:NGramDrafter",
        "combined": "mtpserve.spec.combined:CombinedDrafter",
    },
)
