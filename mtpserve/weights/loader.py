"""Fills a module from checkpoints: plans from the headers, then reads the tensors in file order and converts
each of them.

Not a model builder: the module comes with its parameters, in their dtypes, usually uninitialised. All errors
in a checkpoint but NaN and infinite numbers are raised by plan.py, before the first weight is read.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from time import monotonic

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from torch import Tensor, nn

from mtpserve.core.errors import LoadError
from mtpserve.core.protocols.parallel import ALONE, Ranks
from mtpserve.quant.fp8 import BLOCK, SCALE
from mtpserve.quant.stored import GLOBAL_SCALE, MIDDLE, ZEROS, QuantisedMatrix
from mtpserve.weights.audit import all_finite, parameters
from mtpserve.weights.blocks import hold_blocks
from mtpserve.weights.checkpoint.checkpoint import Checkpoint
from mtpserve.weights.finish import Finisher, inside
from mtpserve.weights.plan import Placement, WeightSource, plan
from mtpserve.weights.quantised.matrix_formats import read_scaled
from mtpserve.weights.rules import COPY, Rule
from mtpserve.weights.shards import Shard, clear, shards_of

log = logging.getLogger(__name__)

# bytes read before a file is mapped anew: what was read counts as this process's memory as long as it is
# mapped
MAPPED = 64 << 20
LOG_S = 10.0  # between two lines of the log while weights are read


def load(
    module: nn.Module,
    checkpoint: Checkpoint,
    rules: Sequence[Rule],
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    progress: bool = False,
    check_finite: bool = True,
    also: Sequence[WeightSource] = (),
    keep: Collection[str] = (),
    whole: nn.Module | None = None,
    ranks: Ranks = ALONE,
) -> None:
    """Fills every parameter and persistent buffer exactly once; every tensor must match exactly one rule.
    Raises LoadError otherwise.

    Parameters keep the dtypes that they were built with: `dtype`, or float32 where a layer requires it.
    `also`: further checkpoints with their own rules, such as a separately published layer. Each submodule's
    `finish_loading()` is called as soon as all of it is filled, a part's before the whole's.

    Quantised matrices are widened to the parameter's dtype; those of the kinds in `keep` (fp8, int4) stay as
    they are stored if the module can multiply them: see blocks.py.

    A module that is one of several `ranks` has its part of each parameter of `whole`, the same model on no
    device: see shards.py.
    """
    whole = module if whole is None else whole
    placements = plan(whole, [WeightSource(checkpoint, rules), *also])
    shards = shards_of(whole, module, ranks)
    _check_dtypes(module, dtype)
    if keep:
        hold_blocks(module, placements, keep, shards)
    targets = parameters(module.to(device))
    clear(targets, shards)
    finisher = Finisher(module, [placement.target for placement in placements])
    total = sum(placement.size for placement in placements)
    with torch.no_grad(), _progress_bar(progress) as bar:
        task, report = bar.add_task("", total=total), _ProgressLog(total, progress or ranks.rank > 0)
        mapped = 0
        for _, of_file in groupby(placements, key=lambda p: p.entry.file):
            for placement in of_file:
                if mapped > MAPPED:
                    placement.checkpoint.close()
                    mapped = 0
                mapped += placement.size
                put(placement, shards[placement.target], targets, check_finite)
                bar.advance(task, placement.size)
                report.advance(placement.size)
                for done in finisher.filled(placement.target):  # their memory may be given back now
                    targets = {name: tensor for name, tensor in targets.items() if not inside(name, done)}
            placement.checkpoint.close()
    finisher.rest()


class _ProgressLog:
    """What the progress bar shows, as a line every few seconds, for logs that no terminal shows."""

    def __init__(self, total: int, quiet: bool) -> None:
        self._total, self._quiet, self._loaded, self._logged = total, quiet, 0, monotonic()

    def advance(self, size: int) -> None:
        self._loaded += size
        if not self._quiet and monotonic() - self._logged >= LOG_S:
            self._logged = monotonic()
            log.info(
                "loading weights: %.0f %%, %.1f of %.1f GiB",
                100 * self._loaded / self._total,
                self._loaded / 2**30,
                self._total / 2**30,
            )


def _progress_bar(shown: bool) -> Progress:
    columns = TextColumn("loading weights"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    return Progress(*columns, console=Console(stderr=True, quiet=not shown), disable=not shown)


def put(placement: Placement, shard: Shard, targets: Mapping[str, Tensor], check_finite: bool = True) -> None:
    """Writes a rank's part of one matrix, norm or bias to its place among `targets`, widened or as it is
    stored. Raises LoadError."""
    parameter, zeros = targets[placement.target], targets.get(placement.target + ZEROS)
    if (scales := targets.get(placement.target + SCALE)) is not None:
        global_scales = targets.get(placement.target + GLOBAL_SCALE)
        _keep(placement, shard, parameter, scales, zeros, global_scales, check_finite)
    else:
        _fill(placement, shard, parameter, check_finite)


def _fill(placement: Placement, shard: Shard, parameter: Tensor, check_finite: bool) -> None:
    moves = list(placement.region.moves(shard))
    if not moves:
        return  # it is another rank's, and is not read
    stored, arranged = placement.stored(parameter.device), placement.arranged
    if stored is None:  # mapped from the file: what is not taken is not read
        tensor = placement.checkpoint.tensor(placement.name)
        ordered = tensor if arranged is None else arranged.arrange(tensor).reshape(shard.whole)
    for move in moves:
        place = move.of(parameter.detach())
        if stored is not None:
            stored.widen_to(place, move.taken, shard.columns)
        else:
            taken, copy = ordered[move.taken], placement.copy
            place.copy_(taken if copy == COPY else taken.float() * copy.times + copy.plus)
        # The stored numbers are checked, not those in the file: a number can also be too large for the
        # parameter's dtype.
        if check_finite and not all_finite(place):
            finite = all_finite(tensor) if stored is None else stored.is_finite()
            what = f"numbers too large for {place.dtype}" if finite else "NaN or infinite numbers"
            raise LoadError(f"{placement.entry.file}: {placement.name} holds {what}")


def _keep(
    placement: Placement, shard: Shard, parameter: Tensor, scales: Tensor, zeros: Tensor | None,
    global_scales: Tensor | None, check_finite: bool
) -> None:  # fmt: skip
    """Copies stored weights, their scales, zeros and global scales."""
    moves = list(placement.region.moves(shard))
    if not moves:
        return
    # Mapped from the file where the numbers are kept as they are: what is not taken is not read.
    as_mapped = placement.format is not None and placement.format.read is read_scaled
    stored = placement.stored(torch.device("cpu") if as_mapped else parameter.device)
    assert stored is not None
    if stored.group_of is not None:
        why = "although the config's desc_act is not true; --quantization none widens it"
        raise LoadError(
            f"{placement.entry.file}: {placement.name} has its columns in groups out of order, {why}"
        )
    groups = stored.scale.shape[-1]
    block_shape = BLOCK if stored.in_blocks else (1, 0 if groups == 1 else shard.columns // groups)
    for move in moves:
        numbers, scale = move.by(1, shard.columns // stored.numbers.shape[-1]), move.by(*block_shape)
        target = QuantisedMatrix(numbers.of(parameter.detach()), scale.of(scales.detach()))
        target.numbers.copy_(stored.numbers[numbers.taken])
        target.scale.copy_(stored.scale[scale.taken])
        if global_scales is not None and stored.global_scale is not None:
            by_row = move.by(1, 0)
            of_rows = by_row.of(global_scales.detach())
            target = replace(target, global_scale=of_rows.copy_(stored.global_scale[by_row.taken]))
        if check_finite and not target.is_finite():
            raise LoadError(f"{placement.entry.file}: {placement.name} holds NaN or infinite numbers")
        if zeros is not None:
            place = scale.of(zeros.detach())
            place.copy_(
                stored.zeros[scale.taken] if stored.zeros is not None else torch.full_like(place, MIDDLE)
            )


def _check_dtypes(module: nn.Module, dtype: torch.dtype) -> None:
    """Raises ValueError, an error of the caller and not of the checkpoint: the module was built with another
    default dtype."""
    dtypes = {p.dtype for p in parameters(module).values() if p.is_floating_point()}
    if dtype not in dtypes or dtypes - {dtype, torch.float32}:
        raise ValueError(
            f"the module was to be built in {dtype}, its parameters are {sorted(map(str, dtypes))}"
        )
