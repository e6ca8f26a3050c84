"""New weights as a caller in this process has them: many tensors, a part of them at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from mtpserve.core.errors import LoadError
from mtpserve.core.protocols.control import (
    Call,
    DropWaiting,
    OnEveryRank,
    Reply,
    SetWeightVersion,
    UpdateTensors,
)

PART_BYTES = 1 << 30  # of the tensors that are checked and written together


def update(
    control: Callable[[Call], Reply], named_tensors: Iterable[tuple[str, Any]], weight_version: str | None
) -> None:
    """`control` has an engine take a call. Raises LoadError, and what `control` raises."""
    waiting: list[str] = []
    for part in parts(named_tensors):
        waiting = control(UpdateTensors(part)).values["waiting"]
    if waiting:
        control(OnEveryRank(DropWaiting()))
        raise LoadError(f"{', '.join(waiting)}: the other tensors of the same parameters are missing")
    if weight_version is not None:
        control(SetWeightVersion(weight_version))


def parts(named_tensors: Iterable[tuple[str, Any]]) -> Iterator[dict[str, Any]]:
    """A later tensor of the same name takes the place of an earlier one."""
    part: dict[str, Any] = {}
    size = 0
    for name, tensor in named_tensors:
        part[name], size = tensor, size + tensor.nbytes
        if size >= PART_BYTES:
            yield part
            part, size = {}, 0
    if part:
        yield part
