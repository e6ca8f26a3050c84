"""The names of a checkpoint's MTP layers, from its tensors and not its config: the config may count layers
that are missing, or none.

DeepSeek (and GLM, Bailing …): `model.layers.{L}.` onwards, right after the trunk's L layers. MiMo:
`model.mtp_layers.{i}.`, MiMo-V2: `model.mtp.layers.{i}.`. LongCat-Flash: `model.mtp.`, with
`model.mtp.layers.{i}.` and what is not numbered. Ernie numbers its parts, not its layers:
`model.mtp_block.{i}.`, `model.mtp_emb_norm.{i}.` and so on. Qwen3-Next and later ones: `mtp.`, with a decoder
layer `mtp.layers.{i}.` for each. Nemotron-H: `mtp.`, with `mtp.layers.{i}.` for each of the two blocks of a
layer; the first has what fuses. DeepSeek-V4: `mtp.{i}.`. A trunk layer and DeepSeek's MTP layer share most
names; only the tensors of the fusion (FUSING) differ.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from mtpserve.core.errors import LoadError
from mtpserve.weights.checkpoint.checkpoint import Checkpoint
from mtpserve.weights.checkpoint.hf_config import HFConfig

log = logging.getLogger(__name__)
COUNT_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules", "num_mtp_layers")
FUSING = r"(?:eh_proj|enorm|hnorm|shared_head\.norm)\.weight"
NUMBERED = re.compile(r"model\.layers\.(\d+)\." + FUSING)
# Tensors that each layer has, with its number; all tensors with a number; the prefix of all that belongs to
# it, without a number where several layers share tensors.
LAYOUTS = {
    "mimo": (r"model\.mtp_layers\.(\d+)\..+", r"model\.mtp_layers\.(\d+)\..+", "model.mtp_layers.{}."),
    "longcat": (
        r"model\.mtp\.layers\.(\d+)\.enorm\.m\.weight",
        r"model\.mtp\.layers\.(\d+)\..+",
        "model.mtp.",
    ),
    "mimo_v2": (r"model\.mtp\.layers\.(\d+)\..+", r"model\.mtp\.layers\.(\d+)\..+", "model.mtp.layers.{}."),
    "ernie": (r"model\.mtp_block\.(\d+)\..+", r"model\.mtp_\w+\.(\d+)\..+", "model.mtp_"),
    "nemotron": (r"mtp\.layers\.(\d+)\.eh_proj\.weight", r"mtp\.layers\.(\d+)\..+", "mtp."),
    "deepseek_v4": (r"mtp\.(\d+)\..+", r"mtp\.(\d+)\..+", "mtp.{}."),
    "qwen": (r"mtp\.layers\.(\d+)\..+", r"mtp\.layers\.(\d+)\..+", "mtp."),
    "deepseek": (NUMBERED.pattern, r"model\.layers\.(\d+)\..+", "model.layers.{}."),
}


@dataclass(frozen=True, slots=True)
class MTPLayout:
    """`prefixes`: one per MTP layer, in order, or one for all; each with its final dot. `numbers`: of the
    layers, in order."""

    kind: str  # dummy, or of LAYOUTS
    prefixes: tuple[str, ...]
    numbers: tuple[int, ...]

    @property
    def prefix(self) -> str:
        return self.prefixes[0]

    @property
    def count(self) -> int:
        return len(self.numbers)

    def unused(self, used: int) -> tuple[str, ...]:
        """Patterns of the tensors that belong to none of the first `used` layers; each name matches at most
        one of them."""
        if not used:
            return tuple(re.escape(prefix) + ".+" for prefix in self.prefixes)
        if used >= self.count or self.kind not in LAYOUTS:
            return ()
        before = "|".join(str(number) for number in range(self.numbers[used]))
        return (LAYOUTS[self.kind][1].replace(r"(\d+)", rf"(?!(?:{before})\.)\d+"),)


def mtp_layers(names: Iterable[str], num_layers: int) -> MTPLayout | None:
    """The layers whose tensors exist, whatever the config says. None if there are none: see `why_no_mtp` for
    the error."""
    names = list(names)
    for kind, (pattern, _, prefix) in LAYOUTS.items():
        first = num_layers if kind == "deepseek" else 0
        if numbers := [i for i in numbers_in(re.compile(pattern), names) if i >= first]:
            return MTPLayout(kind, tuple(dict.fromkeys(prefix.format(i) for i in numbers)), tuple(numbers))
    return None


def with_mtp_layers(checkpoint: Checkpoint, num_layers: int) -> tuple[Checkpoint, MTPLayout | None]:
    """Returns the checkpoint and what `mtp_layers` finds in it. Some tools write such a layer to a file that
    no index names: its tensors are added to the checkpoint."""
    if (layout := mtp_layers(checkpoint.tensors, num_layers)) is not None:
        return checkpoint, layout
    unlisted = checkpoint.unlisted()
    if (layout := mtp_layers(unlisted, num_layers)) is None:
        return checkpoint, None
    also = {name: entry for name, entry in unlisted.items() if name.startswith(layout.prefixes)}
    files = ", ".join(sorted({entry.file.name for entry in also.values()}))
    log.info("%s: the MTP layer is read from %s, which the index does not name", checkpoint.directory, files)
    return replace(checkpoint, tensors=checkpoint.tensors | also), layout


def remains(config: HFConfig, layout: MTPLayout | None, num_layers: int) -> list[str]:
    """Patterns of tensors that only an MTP layer has, where no whole one is there; in DeepSeek's naming of as
    many layers after the trunk as the config counts, since others are a longer trunk's."""
    if layout is not None:
        return []
    configured = configured_layers(config)
    after = range(num_layers, num_layers + (0 if configured is None else configured[1]))
    numbered = [rf"model\.layers\.(?:{'|'.join(map(str, after))})\..+"] if after else []
    return [r"(?:model\.)?mtp[._].+", *numbered]


def numbers_in(pattern: re.Pattern[str], names: Iterable[str]) -> list[int]:
    """Returns the numbers of layers in these names, ascending."""
    return sorted({int(hit[1]) for name in names if (hit := pattern.fullmatch(name))})


def configured_layers(config: HFConfig) -> tuple[str, int] | None:
    """The key that counts MTP layers and its value; None if the config has no such key."""
    for source in (config.section("text_config"), config):
        for key in COUNT_KEYS:
            if source.has(key):
                return source.prefix + key, source.get_int(key, at_least=0)
    return None


def dummy_layers(config: HFConfig, published: int) -> MTPLayout | None:
    """The config's count of MTP layers, for a model without tensors; the prefixes are the module's own.
    `published`: if it has none."""
    configured = configured_layers(config)
    count = published if configured is None else configured[1]
    return MTPLayout("dummy", ("mtp_head.",), tuple(range(count))) if count > 0 else None


def why_no_mtp(config: HFConfig, num_layers: int) -> str:
    """One clause for the error of a launch with MTP when `mtp_layers` gives None."""
    expected = f"model.layers.{num_layers}.eh_proj.weight, model.mtp_layers.0.* and mtp.*"
    configured = configured_layers(config)
    if configured is None or configured[1] == 0:
        return f"the checkpoint has no MTP layer: neither its config nor its tensors ({expected}) name one"
    return (
        f"the checkpoint has no MTP layer: its config says {configured[0]} = {configured[1]}, but there "
        f"are no tensors {expected}"
    )


def nextn_prefix(names: Iterable[str], num_layers: int) -> str:
    """The prefix of the MTP layer in a separately published NextN checkpoint; `num_layers` is the trunk's L.

    Newer exports renumber it to `model.layers.0.`, older ones keep `model.layers.{L}.`. Either may contain
    embed_tokens and shared_head.head, copies of the trunk's that are not loaded. A whole model's directory
    works too, in any layout whose layers have one prefix. Raises LoadError.
    """
    names = list(names)
    layers = {int(hit[1]) for name in names if (hit := NUMBERED.fullmatch(name))}
    for layer in (num_layers, 0):
        if layer in layers:
            return f"model.layers.{layer}."
    whole = None if layers else mtp_layers(names, num_layers)
    if whole is not None and len(whole.prefixes) == 1:
        return whole.prefix
    other = f"; it has one at model.layers.{min(layers)}." if layers else ""
    raise LoadError(
        f"the NextN checkpoint has no MTP layer for a model of {num_layers} layers: neither "
        f"model.layers.{num_layers}.eh_proj.weight nor model.layers.0.eh_proj.weight is there{other}"
    )
