"""What a draft model that is published apart is, by its config and the names of its tensors."""

from __future__ import annotations

import re
from pathlib import Path

from mtpserve.config.drafters import DRAFTERS
from mtpserve.core.errors import ConfigError
from mtpserve.core.gguf import SUFFIX
from mtpserve.models.registry import FAMILIES
from mtpserve.weights.checkpoint.checkpoint import Checkpoint
from mtpserve.weights.checkpoint.hf import read_config
from mtpserve.weights.checkpoint.hf_config import HFConfig
from mtpserve.weights.checkpoint.layouts import NUMBERED, numbers_in

# By their names in --speculative-algorithm, for people.
HEADS = {
    "EAGLE3": "an EAGLE-3 head", "EAGLE": "an EAGLE head", "MEDUSA": "Medusa heads",
    "FROZEN_KV_MTP": "a Gemma 4 assistant",
    "DFLASH": "a DFlash drafter", "NEXTN": "an MTP layer",
}  # fmt: skip
STANDALONE, FROZEN = "STANDALONE", "FROZEN_KV_MTP"
# Parts of what the config says, then names of tensors: the first that is there decides.
SAID = {
    "eagle3": "EAGLE3", "medusa": "MEDUSA", "dflash": "DFLASH", "nextn": "NEXTN",
    "gemma4assistant": FROZEN, "gemma4unifiedassistant": FROZEN,
}  # fmt: skip
NAMED = {
    (
        r"(?:medusa_heads?\.)?\d+\.\d+\.linear\.weight"
        r"|(?:medusa_heads?\.)?blocks\.\d+\.layers\.\d+\.weight"
    ): "MEDUSA",
    r"(?:model\.)?hidden_norm\.weight": "DFLASH",
    r"d2t|(?:model\.)?midlayer\..+|(?:model\.)?layers\.0\.hidden_norm\.weight": "EAGLE3",
    r"(?:model\.)?fc\.weight": "EAGLE",
}
NUMBERED_LAYER = re.compile(r"model\.layers\.(\d+)\..+")


def algorithm_of(directory: Path) -> str | None:
    """Returns the name in --speculative-algorithm; None if nothing tells."""
    if directory.suffix == SUFFIX:
        return STANDALONE
    if not directory.is_dir():
        return None
    path = directory / "config.json"
    values = read_config(directory) if path.is_file() else HFConfig(path, {})
    description = (
        f"{values.raw('architectures')} {values.raw('model_type')} {values.raw('speculators_model_type')}"
    ).lower()
    keys = " ".join(key for key in values.values if key.endswith(("_num_heads", "_config")))
    for keyword, kind in SAID.items():
        if keyword in description or keyword in keys:
            return kind
    names = list(Checkpoint.open(directory).tensors) if any(directory.glob("*.safetensors")) else []
    for pattern, kind in NAMED.items():
        if any(re.fullmatch(pattern, name) for name in names):
            return kind
    if values.has("draft_vocab_size") or values.has("eagle_config"):
        return "EAGLE3"
    if "eagle" in description:
        return "EAGLE"
    layers, apart = numbers_in(NUMBERED_LAYER, names), numbers_in(NUMBERED, names)
    if apart and layers[0] == apart[0]:
        return "NEXTN"
    architectures = values.raw("architectures")
    is_known = isinstance(architectures, list) and any(name in FAMILIES.entries for name in architectures)
    return STANDALONE if names and is_known else None


def require_kind(algorithm: str, directory: Path) -> None:
    """Raises ConfigError where --speculative-algorithm `algorithm` names a kind of draft model, and another
    one is there."""
    kind = algorithm_of(directory)
    if (
        kind is None
        or algorithm not in (*HEADS, "MTP", STANDALONE, "DRAFT_MODEL")
        or DRAFTERS.entries[algorithm] == DRAFTERS.entries[kind]
    ):
        return
    # EAGLE has several meanings, and an MTP layer may be a whole model's.
    models = (STANDALONE, FROZEN)
    if kind in {"EAGLE": ("EAGLE3", "NEXTN", *models), "MTP": models, "NEXTN": models}.get(algorithm, ()):
        return
    what = HEADS.get(kind, "a whole model")
    raise ConfigError(
        f"--speculative-algorithm {algorithm}: {directory} is {what}, whose algorithm is {kind}"
    )
