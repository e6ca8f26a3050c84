"""The parameters that stay as they are stored, whatever the config says: all their matrices have scales in
the checkpoint, in one format that a product reads.

Decided for each parameter: a checkpoint may have some layers quantised and others not.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from mtpserve.quant.fp8 import BLOCK, FP8, make_room
from mtpserve.quant.stored import make_room_by_row
from mtpserve.weights.plan import Placement, parts_of
from mtpserve.weights.quantised.matrix_formats import StoredFormat
from mtpserve.weights.shards import Shard

log = logging.getLogger(__name__)
NOT_WHOLE = "a rank's part of it would not be whole blocks or groups"
STEP = 32  # columns: a kernel's step over the inputs stays in a group, but NVFP4's


def hold_blocks(
    module: nn.Module, placements: Iterable[Placement], kinds: Collection[str], shards: Mapping[str, Shard]
) -> list[str]:
    """Allocates room for stored weights and scales in the modules that support them (`may_hold_blocks`), for
    formats of these `kinds` (fp8, int4). All others are widened while loading. `shards`: what the module has
    of each parameter. → the parameters that are widened only because ranks share them."""
    cut = list[str]()
    by_target: dict[str, list[Placement]] = defaultdict(list)
    for placement in placements:
        by_target[placement.target].append(placement)
    for target, members in by_target.items():
        path, _, name = target.rpartition(".")
        owner: Any = module.get_submodule(path)
        formats = [placement.format for placement in members if placement.format is not None]
        if not formats:
            continue
        shard = shards[target]
        if (why := why_wide(owner, name, members, formats, kinds, shard)) is not None:
            log.debug("%s is expanded to --dtype: %s", target, why)
            cut += [target] if why == NOT_WHOLE else []
        elif (whole := formats[0].groups) is None:
            make_room(owner, name, parts_of(owner, name))
        else:
            first, zeros = formats[0], any(fmt.zeros for fmt in formats)
            groups = whole if whole == 1 else whole * shard.dims[-1].size // shard.columns
            scales = scale_dtype(first, members)
            make_room_by_row(owner, name, first.bits, groups, zeros, scales, first.global_scale)
    return cut


def why_wide(
    owner: Any, name: str, members: list[Placement], formats: list[StoredFormat], kinds: Collection[str],
    shard: Shard
) -> str | None:  # fmt: skip
    """Returns why a parameter is widened; None: it can be kept. A fused matrix is multiplied in one product,
    so that its parts must be alike; those in blocks must begin at block boundaries, experts' parts have
    separate scales. Ranks must share whole blocks or groups."""
    first = formats[0]
    if name not in getattr(owner, "may_hold_blocks", ()):
        return "its module cannot multiply quantised weights"
    if len(formats) < len(members):
        return f"only {len(formats)} of its {len(members)} matrices have scales"
    if any((fmt.bits, fmt.groups, fmt.floats) != (first.bits, first.groups, first.floats) for fmt in formats):
        return (
            f"its matrices have different formats: {', '.join(dict.fromkeys(fmt.label for fmt in formats))}"
        )
    if (wide := next((fmt.wide for fmt in formats if fmt.wide is not None), None)) is not None:
        return wide
    if first.kind not in kinds:
        return f"{first.label} is not to be kept here"
    if first.groups is None:
        if any(
            not placement.region.of_experts and placement.region.start % BLOCK[0] for placement in members
        ):
            return f"its parts of {parts_of(owner, name)} rows do not begin at multiples of {BLOCK[0]}"
        block_shape = BLOCK
    else:
        block_shape = 1, 2 if first.groups == 1 else shard.columns // first.groups
        if first.groups > 1 and block_shape[1] % STEP and not first.global_scale:
            return f"no product reads {first.label}"
    if not shard.filled or not all(
        dim.divides(block) for dim, block in zip(shard.dims[-2:], block_shape, strict=True)
    ):
        return NOT_WHOLE
    return None


def scale_dtype(first: StoredFormat, members: list[Placement]) -> torch.dtype:
    """Returns the dtype of scales. That of four bits is the checkpoint's: with 32 numbers each, scales of 32
    bits would be a fifth of a matrix."""
    if first.bits == 8:
        return torch.float32
    if first.floats:
        return FP8 if first.global_scale else torch.float8_e8m0fnu
    stored = {placement.checkpoint.tensors[placement.group.tensors["scale"]].dtype for placement in members}
    return (
        {"F16": torch.float16, "BF16": torch.bfloat16}.get(stored.pop(), torch.float32)
        if len(stored) == 1
        else torch.float32
    )
