"""Which parameters stay in float8: those for which every matrix has scales in the checkpoint, whatever the config says.

Decided for each parameter: a checkpoint may have some layers in float8 and others not.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from torch import nn

from mtpserve.quant.fp8 import BLOCK, make_room
from mtpserve.weights.plan import Placement, parts_of

log = logging.getLogger(__name__)


def hold_blocks(module: nn.Module, placements: Iterable[Placement]) -> None:
    """Allocates float8 weights and scales in the modules that support them (`may_hold_blocks`). All others are expanded while loading.

    A fused matrix is multiplied in one product, so its parts must begin at block boundaries; experts' parts have separate scales.
    """
    by_target: dict[str, list[Placement]] = defaultdict(list)
    for placement in placements:
        by_target[placement.target].append(placement)
    for target, members in by_target.items():
        path, _, name = target.rpartition(".")
        owner: Any = module.get_submodule(path)
        scaled = sum(placement.format is not None and placement.format.groups is None for placement in members)
        if not scaled:
            continue
        if name not in getattr(owner, "may_hold_blocks", ()):
            log.debug("%s is expanded: its module cannot multiply float8", target)
        elif scaled < len(members):
            log.debug("%s is expanded: only %d of its %d matrices have block scales", target, scaled, len(members))
        elif any(placement.region.expert is None and placement.region.start % BLOCK[0] for placement in members):
            log.debug("%s is expanded: its parts of %s rows do not begin at multiples of %d", target, parts_of(owner, name), BLOCK[0])
        else:
            make_room(owner, name, parts_of(owner, name))
