"""New weights for a module that serves: named tensors of a checkpoint go by the family's rules to the places
of the old ones.

    named tensors → placements (plan.py) → parts that are complete (parts.py) → their numbers are checked
                                        └→ others wait, in host memory, for the tensors that they lack
    each part:  filled in place, where its numbers are as in the checkpoint
                filled beside it, packed as after a load, and copied over it
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mtpserve.core.errors import LoadError
from mtpserve.core.heartbeat import PULSE
from mtpserve.core.protocols.parallel import Ranks
from mtpserve.quant.fp8 import SCALE
from mtpserve.quant.stored import GLOBAL_SCALE, ZEROS
from mtpserve.weights.audit import Audit, all_finite, parameters
from mtpserve.weights.checkpoint.checkpoint import Checkpoint
from mtpserve.weights.checkpoint.tensor_entry import TensorEntry
from mtpserve.weights.loader import put
from mtpserve.weights.parts import Part, Renewal, overwrite, parts_of_module, tensors_in
from mtpserve.weights.plan import Placement, Region, WeightSource, placements_of, region_of
from mtpserve.weights.quantised import formats, matrix_formats
from mtpserve.weights.rules import COPY, Arranged, Copy, Matcher
from mtpserve.weights.shards import clear, shards_of

FILE = Path("the update")  # in place of a file's name, in messages
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class NamedTensors(dict[str, Tensor]):
    """Tensors in memory as a file of a checkpoint."""

    def get_tensor(self, name: str) -> Tensor:
        return self[name]

    def checkpoint(self) -> Checkpoint:
        """Raises LoadError for a dtype that no checkpoint has."""
        entries = {}
        for name, tensor in self.items():
            if tensor.dtype not in DTYPES:
                raise LoadError(f"{FILE}: {name} has the unknown dtype {tensor.dtype}")
            size = tensor.numel() * tensor.element_size()
            entries[name] = TensorEntry(FILE, DTYPES[tensor.dtype], tuple(tensor.shape), 0, size)
        return Checkpoint(FILE, entries, {FILE: self})


@dataclass(frozen=True, slots=True)
class StagedUpdate:
    """Tensors that were checked and are not written yet. `waiting`: for the others of their parts."""

    placements: Mapping[Part, Sequence[Placement]]
    waiting: NamedTensors


class ServingWeights:
    """`live`: the module that serves, or a rank's part of it. `blueprint`: the same, built anew on no device
    with the same kernels. `whole`: that of all ranks, on no device. `sources`: the checkpoints that it was
    loaded from, with their rules."""

    def __init__(
        self,
        live: nn.Module,
        blueprint: nn.Module,
        whole: nn.Module,
        sources: Sequence[WeightSource],
        *,
        prefixes: Sequence[str],
        ranks: Ranks,
        packs_in_place: bool,
    ) -> None:
        """`prefixes`: of the sources' names, "" for the first. Names without one may be any source's."""
        self._prefixes = prefixes
        self._live, self._blueprint, self._sources = live, blueprint, sources
        self._whole, self._parameters, self._ranks = whole, parameters(whole), ranks
        self._shards = shards_of(whole, blueprint, ranks)
        self._roles = {
            group.name: tuple(group.tensors)
            for source in sources
            for group in formats.groups(source.checkpoint.tensors)
        }
        self._matchers = [Matcher(source.rules) for source in sources]
        make_room_as(live, blueprint)
        self._rooms = parameters(blueprint)
        self._parts = parts_of_module(live, blueprint, packs_in_place)
        self._device = next(tensor.device for tensor in parameters(live).values())
        self.waiting = NamedTensors()  # for the other tensors of their parts

    # -- stage -----------------------------------------------------------------------------------------------

    def stage_tensors(self, tensors: Mapping[str, Tensor]) -> StagedUpdate:
        """Checks tensors, with those that have waited for them. Writes nothing. Raises LoadError."""
        together = {**self.waiting, **tensors}
        by_prefix = {prefix: NamedTensors() for prefix in self._prefixes}
        for name, tensor in together.items():
            prefix = max(filter(name.startswith, self._prefixes), key=len)
            by_prefix[prefix][name.removeprefix(prefix)] = tensor
        checkpoints = {prefix: part.checkpoint() for prefix, part in by_prefix.items() if part}
        return self._stage(checkpoints, together)

    def stage_checkpoint(self, checkpoint: Checkpoint, prefix: str = "") -> StagedUpdate:
        """The same for a directory's tensors, of which none may wait. `prefix`: of all their names."""
        if prefix not in self._prefixes:
            raise LoadError(f"the names' prefix must be one of {self._prefixes}, got {prefix!r}")
        staged = self._stage({prefix: checkpoint}, {})
        if staged.waiting:
            raise LoadError(f"{checkpoint.directory}: {missing(staged.waiting)}")
        return staged

    def _stage(self, checkpoints: Mapping[str, Checkpoint], tensors: Mapping[str, Tensor]) -> StagedUpdate:
        sources, waiting = list[WeightSource](), list[str]()
        for prefix, checkpoint in checkpoints.items():
            of_checkpoint, lacking = self._by_source(checkpoint, self._prefixes.index(prefix))
            sources += of_checkpoint
            waiting += [prefix + name for name in lacking]
        audit, by_part = Audit(self._parameters), defaultdict[Part, list[Placement]](list)
        for placement in placements_of(self._whole, sources, audit, logging.DEBUG):
            self._check_format(placement)
            by_part[self._parts[placement.target]].append(placement)
        gaps = {name for name, _, _ in audit.gaps()}
        complete = {
            part: placements for part, placements in by_part.items() if gaps.isdisjoint(part.parameters)
        }
        names = {id(checkpoint.handles): prefix for prefix, checkpoint in checkpoints.items()}
        for part in by_part.keys() - complete.keys():
            for placement in by_part[part]:
                prefix = names[id(placement.checkpoint.handles)]
                waiting += [prefix + name for name in placement.group.tensors.values()]
        for placement in chain.from_iterable(complete.values()):
            self._check_numbers(placement)
        empty = torch.empty(0)
        return StagedUpdate(complete, NamedTensors({name: tensors.get(name, empty) for name in waiting}))

    def _by_source(self, checkpoint: Checkpoint, first: int) -> tuple[list[WeightSource], list[str]]:
        """The tensors by the source whose rules name them, and those whose matrix is not whole. `first`: the
        number of the first source that they may be of. Raises LoadError for a name that no rule has."""
        of_source: list[dict[str, TensorEntry]] = [{} for _ in self._sources]
        waiting: list[str] = []
        for group in formats.groups(checkpoint.tensors):
            whole, role = formats.belongs(group.name)
            number, before = self._source_of(group.name, first), self._roles.get(group.name, ())
            if number is not None and is_whole(group, checkpoint.tensors, before):
                of_source[number] |= {name: checkpoint.tensors[name] for name in group.tensors.values()}
            elif number is not None or (role != "plain" and self._source_of(whole, first) is not None):
                waiting += group.tensors.values()
            elif formats.unused(group.name, checkpoint) is None:
                file = checkpoint.tensors[group.main].file
                raise LoadError(f"{file}: {group.name}: the model has no parameter for this tensor")
        return [
            WeightSource(
                replace(checkpoint, directory=source.checkpoint.directory, tensors=entries), source.rules
            )
            for source, entries in zip(self._sources, of_source, strict=True)
            if entries
        ], waiting

    def _source_of(self, name: str, first: int) -> int | None:
        for number, matcher in enumerate(self._matchers):
            if number < first:
                continue
            try:
                matcher.match(name)
            except LoadError:
                continue
            return number
        return None

    def _check_format(self, placement: Placement) -> None:
        """Raises LoadError where the parameter is kept in another format."""
        numbers, scale = self._rooms[placement.target], self._rooms.get(placement.target + SCALE)
        if scale is None:
            return
        fmt, shard = placement.format, self._shards[placement.target]
        where = f"{placement.entry.file}: {placement.name}"
        storage = f"{where}: the model keeps {placement.target} in {numbers.dtype}"
        if fmt is None:
            raise LoadError(f"{storage} with scales; send its numbers and scales in that format")
        groups: int | None = None  # a scale for each block has fewer rows than the numbers
        if scale.shape[-2] == numbers.shape[-2]:
            groups = scale.shape[-1] * shard.columns // shard.dims[-1].size if scale.shape[-1] > 1 else 1
        bits = 8 if numbers.dtype == torch.float8_e4m3fn else 4
        floats = bits == 8 or scale.itemsize == 1  # of four bits e2m1 alone has scales of one byte
        has_zeros = placement.target + ZEROS in self._rooms
        if (fmt.bits, fmt.groups, fmt.floats) != (bits, groups, floats) or (fmt.zeros and not has_zeros):
            raise LoadError(f"{storage} with other scales than those of {fmt.label}")

    def _check_numbers(self, placement: Placement) -> None:
        """Raises LoadError for numbers that are not finite, in the file or in the parameter's dtype."""
        where, dtype = f"{placement.entry.file}: {placement.name}", self._parameters[placement.target].dtype
        if (stored := placement.stored(torch.device("cpu"))) is not None:
            if not stored.is_finite():
                raise LoadError(f"{where} holds NaN or infinite numbers")
            return
        tensor = placement.checkpoint.tensor(placement.name)
        if not all_finite(tensor):
            raise LoadError(f"{where} holds NaN or infinite numbers")
        if not all_finite(tensor.to(dtype)):
            raise LoadError(f"{where} holds numbers too large for {dtype}")
        live = parameters(self._live).get(placement.target)
        if tensor.is_floating_point() or live is None or live.shape != tensor.shape:
            return
        if not torch.equal(live.to(tensor), tensor):
            raise LoadError(f"{where} is a table that cannot change while the model serves")

    # -- read ------------------------------------------------------------------------------------------------

    def read(self, name: str, rows: int) -> list[Any]:
        """The first rows of a tensor as a checkpoint has it, as nested lists of float32. Raises LoadError."""
        prefix = max(filter(name.startswith, self._prefixes), key=len)
        stem = name.removeprefix(prefix)
        number = self._source_of(stem, self._prefixes.index(prefix))
        rule, groups = self._matchers[number or 0].match(stem) if number is not None else (None, {})
        if rule is None or rule.target is None:
            raise LoadError(f"{name}: the model has no parameter for this tensor")
        target = rule.resolve(groups)
        region = region_of(self._whole, self._parameters[target], target, rule.how, groups)
        if region is None or isinstance(rule.how, Arranged) or self._ranks.size > 1:
            raise LoadError(f"{name}: the model has it in parts, or in another order, and does not say it")
        copy, stored = (
            rule.how if isinstance(rule.how, Copy) else COPY,
            self._rows_of(name, target, region, rows),
        )
        values: list[Any] = ((stored.float() - copy.plus) / copy.times).tolist()
        return values

    def _rows_of(self, name: str, target: str, region: Region, rows: int) -> Tensor:
        path, _, leaf = target.rpartition(".")
        owner: Any = self._live.get_submodule(path)
        live, is_stored = parameters(self._live).get(target), target + SCALE in self._rooms
        if (
            live is not None
            and not is_stored
            and (not self._parts[target].packed or hasattr(owner, "method"))
        ):
            return region.of(live.detach())[:rows]
        if leaf == "weight" and region.expert is None and hasattr(owner, "packed"):
            number = min(rows, region.rows or self._parameters[target].shape[0])
            places = torch.arange(region.start, region.start + number, device=self._device)
            numbers: Tensor = (
                owner.method.rows(owner, places) if hasattr(owner, "method") else owner.own_rows(places)
            )
            return numbers
        raise LoadError(f"{name}: the parameter {target} is packed, and cannot be read")

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All that comes of a checkpoint, as it is multiplied."""
        values: dict[int, Any] = {}
        for name, tensor in parameters(self._live).items():
            yield from tensors_in(name, tensor, values)
        for part in self._parts.values():
            for name in part.modules:
                attributes = self._live.get_submodule(name).__dict__.items()
                derived = {key: value for key, value in attributes if not key.startswith("_")}
                yield from tensors_in(name, derived, values)

    # -- commit ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def commit(self, staged: StagedUpdate) -> None:
        """Writes what was staged, one part at a time."""
        for part, placements in staged.placements.items():
            PULSE.beat()
            renewal = Renewal(self._live, self._blueprint, part, self._device)
            if part.packed:
                clear(renewal.targets, {name: self._shards[name] for name in part.parameters})
            for placement in placements:
                put(placement, self._shards[placement.target], renewal.targets, check_finite=False)
            renewal.finish()
        for module in self._live.modules():
            for head, make in getattr(module, "subset_heads", ()):
                overwrite(head, make(), set())
        self.waiting = NamedTensors({name: tensor.cpu().clone() for name, tensor in staged.waiting.items()})


def is_whole(group: formats.Group, tensors: Mapping[str, TensorEntry], before: Collection[str]) -> bool:
    """The tensors are there without which its numbers mean nothing. `before`: roles of the tensors that the
    matrix was loaded from: some formats have zeros, or an order of columns, where they need them."""
    role = next((role for role in formats.NUMBERS if role in group.tensors), None)
    if role is None:
        return False
    if role == "plain" and tensors[group.main].dtype not in ("F8_E4M3", "F8_E5M2", "I8", "U8"):
        return True
    needs = matrix_formats.FORMATS[role][0] | (set(before) if role in before else set())
    return needs <= group.tensors.keys()


def make_room_as(live: nn.Module, blueprint: nn.Module) -> None:
    """Changes the blueprint: what the module has as the checkpoint stores it has the same dtypes and scales
    there."""
    stored = parameters(live)
    for name in [name.removesuffix(SCALE) for name in stored if name.endswith(SCALE)]:
        path, _, leaf = name.rpartition(".")
        owner = blueprint.get_submodule(path)
        for suffix in ("", SCALE, ZEROS, GLOBAL_SCALE):
            if (tensor := stored.get(name + suffix)) is not None:
                empty = torch.empty_like(tensor, device="meta")
                setattr(owner, leaf + suffix, nn.Parameter(empty, requires_grad=False))


def missing(waiting: Iterable[str]) -> str:
    """Says which tensors do not go without others."""
    names = list(waiting)
    shown = ", ".join(names[:3]) + (f" … ({len(names)} in all)" if len(names) > 3 else "")
    return f"{shown}: the other tensors of the same parameters are missing"
