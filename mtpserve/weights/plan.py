"""The place of each tensor of a checkpoint, from the headers alone. All errors but those in the numbers are
raised here.

So a wrong checkpoint fails before a single weight is read. loader.py carries the plan out.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from mtpserve.core.errors import LoadError
from mtpserve.quant.stored import QuantisedMatrix
from mtpserve.weights.audit import Audit, Fill, parameters, row_count
from mtpserve.weights.checkpoint import hf, schemes
from mtpserve.weights.checkpoint.checkpoint import Checkpoint
from mtpserve.weights.checkpoint.tensor_entry import TensorEntry
from mtpserve.weights.quantised import formats
from mtpserve.weights.quantised.formats import Group
from mtpserve.weights.quantised.matrix_formats import StoredFormat
from mtpserve.weights.rules import (
    COPY,
    Arranged,
    Copy,
    Drop,
    EveryExpert,
    Expert,
    Groups,
    How,
    Matcher,
    Rule,
    Stack,
    source_name,
)
from mtpserve.weights.shards import Move, Shard

log = logging.getLogger(__name__)
SHOWN = 3  # names in the message about a missing tensor
INTEGERS = {
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True, slots=True)
class WeightSource:
    """A checkpoint and the rules for its names: in a separately published layer the same name is another
    parameter than in a whole model."""

    checkpoint: Checkpoint
    rules: Sequence[Rule]


@dataclass(frozen=True, slots=True)
class Region:
    """Rows of a parameter, or of one expert's matrix in a parameter [experts, rows, columns], or of `every`
    one's; all of them where `rows` is None."""

    expert: int | None = None
    start: int = 0
    rows: int | None = None
    every: bool = False

    @property
    def of_experts(self) -> bool:
        return self.expert is not None or self.every

    def of(self, parameter: Tensor) -> Tensor:
        """A view."""
        if self.expert is not None:
            parameter = parameter[self.expert]
        return parameter if self.rows is None else parameter.narrow(int(self.every), self.start, self.rows)

    def moves(self, shard: Shard) -> Iterator[Move]:
        """Yields the moves from the tensor of the region to the rank's part of the parameter."""
        return shard.moves(self.expert, None if self.rows is None else (self.start, self.rows), self.every)

    def fills(self, parameter: Tensor, source: str) -> list[Fill]:
        """The region in the audit's numbering of rows."""
        if self.rows is None:
            return [Fill(0, row_count(parameter), source)]
        experts = range(parameter.shape[0]) if self.every else [self.expert or 0]
        first = [self.start + expert * parameter.shape[1] if expert else self.start for expert in experts]
        return [Fill(start, start + self.rows, source) for start in first]


@dataclass(frozen=True, slots=True)
class Placement:
    """One matrix, norm or bias of a checkpoint and its place in the module. `arranged`: it is in another
    order than the parameter; `copy`: what is done with its numbers."""

    checkpoint: Checkpoint
    group: Group
    format: StoredFormat | None  # None: one tensor, not quantised
    target: str
    region: Region
    copy: Copy = COPY
    arranged: Arranged | None = None

    @property
    def name(self) -> str:
        """The name of its tensor; for a quantised matrix the tensor with the numbers."""
        return self.group.main

    @property
    def entry(self) -> TensorEntry:
        return self.checkpoint.tensors[self.name]

    @property
    def size(self) -> int:
        """The size of all its tensors, in bytes."""
        return sum(self.checkpoint.tensors[name].size for name in self.group.tensors.values())

    def stored(self, device: torch.device) -> QuantisedMatrix | None:
        """Reads the tensors of a quantised matrix, its rows in the parameter's order. None for others."""
        if self.format is None:
            return None
        matrix = self.format.read(
            {role: self.checkpoint.tensor(name).to(device) for role, name in self.group.tensors.items()}
        )
        return matrix if self.arranged is None else matrix.in_order(self.arranged.arrange)


def plan(module: nn.Module, sources: Sequence[WeightSource]) -> list[Placement]:
    """The placements in the order of their bytes in the files. Raises LoadError."""
    audit = Audit(parameters(module))
    placements = placements_of(module, sources, audit)
    if gaps := list(audit.gaps()):
        raise LoadError(_missing(module, sources, audit.parameters, gaps))
    return placements


def placements_of(
    module: nn.Module, sources: Sequence[WeightSource], audit: Audit, level: int = logging.INFO
) -> list[Placement]:
    """The placements of all tensors in the order of their bytes in the files; what they fill is recorded in
    `audit`, and what is left out is logged. Raises LoadError."""
    placements: list[Placement] = []
    for source in sources:
        matcher, quant_config, left_out = (
            Matcher(source.rules),
            quant_config_of(source.checkpoint),
            Counter[str](),
        )
        for group in formats.groups(source.checkpoint.tensors):
            placement = _place(module, source.checkpoint, matcher, group, audit, quant_config, left_out)
            if placement is not None:
                placements.append(placement)
        for reason, number in left_out.items():
            # Copies are as published, and nothing is lost with them.
            quiet = logging.DEBUG if reason.startswith("a copy") else level
            log.log(quiet, "%s: tensors not loaded: %d (%s)", source.checkpoint.directory, number, reason)
    return sorted(placements, key=lambda p: (p.entry.file, p.entry.start))


def quant_config_of(checkpoint: Checkpoint) -> schemes.QuantConfig:
    """What its config says of formats; the defaults where it has none."""
    there = (checkpoint.directory / "config.json").is_file()
    return (
        schemes.quant_config_of(hf.quantization_section(hf.read_config(checkpoint.directory)))
        if there
        else schemes.QuantConfig()
    )


def _place(
    module: nn.Module,
    checkpoint: Checkpoint,
    matcher: Matcher,
    group: Group,
    audit: Audit,
    quant_config: schemes.QuantConfig,
    left_out: Counter[str],
) -> Placement | None:
    """Places one group; None for tensors that are dropped, which are counted in `left_out`."""
    name, entry = group.name, checkpoint.tensors[group.main]
    try:
        rule, groups = matcher.match(name)
    except LoadError as error:
        if (reason := formats.unused(name, checkpoint)) is None:
            raise LoadError(f"{entry.file}: {_unmatched(name, error)}") from None
        left_out[reason] += 1
        return None
    if isinstance(rule.how, Drop):
        left_out[rule.how.reason] += 1
        return None
    target = rule.resolve(groups)
    parameter = audit.parameters.get(target)
    if parameter is None:
        raise LoadError(f"{entry.file}: {name} belongs to {target}, which this model does not have")
    region = region_of(module, parameter, target, rule.how, groups)
    if region is None:
        if isinstance(rule.how, Expert) and int(groups["expert"]) < parameter.shape[0] + rule.how.idle:
            left_out["of experts that compute nothing"] += 1
            return None
        raise LoadError(f"{entry.file}: {name} is one expert too many, {target} has {parameter.shape[0]}")
    place, arranged = region.of(parameter), rule.how if isinstance(rule.how, Arranged) else None
    format = formats.format_of(
        group,
        checkpoint.tensors,
        tuple(place.shape),
        quant_config,
        arranged.chunks if arranged is not None else 0,
    )
    if format is None:
        wanted = tuple(place.shape)
        _check(name, entry, target, place, wanted if arranged is None else arranged.shape(wanted))
    elif arranged is not None:
        # The rows of a quantised matrix are its outputs, whatever those of others are.
        arranged = replace(arranged, turned=False)
    for fill in region.fills(parameter, name):
        audit.record(target, fill)
    return Placement(
        checkpoint,
        group,
        format,
        target,
        region,
        rule.how if isinstance(rule.how, Copy) else COPY,
        arranged,
    )


def _unmatched(name: str, error: LoadError) -> str:
    whole, role = formats.belongs(name)
    return (
        str(error) if role == "plain" else f"{name} is the {role} of {whole}, which is not in the checkpoint"
    )


def region_of(module: nn.Module, parameter: Tensor, target: str, how: How, groups: Groups) -> Region | None:
    """Returns the region of a parameter; None if the model has no such expert."""
    if not isinstance(how, Stack | Expert | EveryExpert):
        return Region()
    path, _, leaf = target.rpartition(".")
    parts = parts_of(module.get_submodule(path), leaf)
    expert = int(groups["expert"]) if isinstance(how, Expert) else None
    if expert is not None and expert >= parameter.shape[0]:
        return None
    return Region(expert, sum(parts[: how.part]), parts[how.part], every=isinstance(how, EveryExpert))


def parts_of(owner: Any, name: str) -> tuple[int, ...]:
    """Row counts of the matrices fused in one parameter: its module's `parts`, which may be a mapping by
    parameter."""
    of_module: Any = owner.parts
    parts: tuple[int, ...] = of_module[name] if isinstance(of_module, Mapping) else of_module
    return parts


def _check(name: str, entry: TensorEntry, target: str, place: Tensor, shape: tuple[int, ...]) -> None:
    """Checks shape and dtype of a tensor that is not quantised against its place in the model, whose `shape`
    it has in the checkpoint."""
    if entry.shape != shape:
        raise LoadError(
            f"{entry.file}: {name} has shape {list(entry.shape)}, the model needs {list(shape)} "
            f"(for {target})"
        )
    if entry.dtype.startswith("F8_"):
        scales = f"its scales {name}_scale_inv or {name}_scale"
        raise LoadError(
            f"{entry.file}: {name} is stored as {entry.dtype}, but {scales} are not in the checkpoint"
        )
    if not (place.is_floating_point() if entry.is_real else takes(place.dtype, INTEGERS.get(entry.dtype))):
        raise LoadError(
            f"{entry.file}: {name} is stored as {entry.dtype}, which {target} of {place.dtype} cannot take"
        )


def takes(place: torch.dtype, stored: torch.dtype | None) -> bool:
    """Integers that are all in the range of the place's."""
    return stored == place or (
        place == torch.int64 and stored in (torch.int32, torch.int16, torch.int8, torch.uint8)
    )


def _missing(
    module: nn.Module,
    sources: Sequence[WeightSource],
    params: Mapping[str, Tensor],
    gaps: list[tuple[str, int, int]],
) -> str:
    """The error for `gaps`: names the first unfilled parameter and the tensors with which the rules would
    fill it."""
    target, start, stop = gaps[0]
    wanted = Fill(start, stop, "")
    names = [fill.source for fill in sorted(_candidates(module, sources, params, target, wanted))]
    shown = ", ".join(names[:SHOWN]) + (f" … ({len(names)} in all)" if len(names) > SHOWN else "")
    more = f"; {len(gaps) - 1} more gaps like this" if len(gaps) > 1 else ""
    where = " and ".join(str(source.checkpoint.directory) for source in sources)
    return f"{where}: missing {shown or 'tensor that no rule names'}: nothing fills {target}{more}"


def _candidates(
    module: nn.Module,
    sources: Sequence[WeightSource],
    params: Mapping[str, Tensor],
    target: str,
    wanted: Fill,
) -> Iterator[Fill]:
    """The tensors with which the rules would fill these rows, under any of the parameter's names; a fill's
    source is the tensor's name."""
    parameter = params[target]
    aliases = [name for name, other in params.items() if other is parameter]
    rules = [rule for source in sources for rule in source.rules if not isinstance(rule.how, Drop)]
    for alias, rule in product(aliases, rules):
        for expert in range(parameter.shape[0]) if isinstance(rule.how, Expert) else [None]:
            name = source_name(rule, alias, expert)
            if name is None:
                break
            region = region_of(module, parameter, alias, rule.how, {"expert": str(expert)})
            assert region is not None
            yield from (fill for fill in region.fills(parameter, name) if fill.overlaps(wanted))
