"""The parts of a module that serves, which get new weights one at a time, and how one does.

A part is one parameter, or all that is packed together: a module's parameters that it names in `packs`, and
what copies them, such as a tied head. No tensor of the module moves: captured graphs and descriptions of
layers hold their addresses.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mtpserve.quant.fp8 import SCALE
from mtpserve.quant.stored import GLOBAL_SCALE, ZEROS
from mtpserve.weights.audit import parameters


@dataclass(frozen=True, slots=True)
class Part:
    """`modules`: names of those that read the parameters when they finish loading, or none. `parameters`:
    names. `packed`: the module's own are not as in the checkpoint, so that all of them are needed."""

    modules: tuple[str, ...]
    parameters: tuple[str, ...]
    packed: bool


def parts_of_module(live: nn.Module, blueprint: nn.Module, packs_in_place: bool) -> dict[str, Part]:
    """By the names of the parameters. `live`: the module that serves; `blueprint`: the same, built anew on no
    device."""
    names, live_names = list(parameters(blueprint)), parameters(live)
    modules = dict(blueprint.named_modules())
    roots = {name: root_of(name, modules) for name in names}
    parts: dict[str, Part] = {}
    for name in names:
        root = roots[name]
        members = () if root is None else members_of(root, modules)
        if not members:
            parts[name] = Part((), (name,), packed=False)
            continue
        together = tuple(other for other in names if roots[other] == root)
        # What has a method of its own does not keep a parameter that it has packed.
        reordered = packs_in_place and not any(hasattr(modules[member], "method") for member in members)
        packed = reordered or any(other not in live_names for other in together)
        parts[name] = Part(members, together if packed else (name,), packed)
    return parts


def root_of(name: str, modules: Mapping[str, nn.Module]) -> str | None:
    """The name of the module with whose parameters this one is packed; None: it is not packed."""
    owner = path = name.rpartition(".")[0]
    while True:
        below = name.removeprefix(f"{path}." if path else "").partition(".")[0]
        if below in getattr(modules[path], "packs", ()):
            return path
        if not path:
            break
        path = path.rpartition(".")[0]
    return owner if len(members_of(owner, modules)) > 1 else None


def members_of(root: str, modules: Mapping[str, nn.Module]) -> tuple[str, ...]:
    """The module, and those that read its parameters and do not hold it: it is in a list of theirs."""
    members = [root]
    for _ in range(2):  # a copy may have a copy
        held = {id(modules[name]) for name in members}
        members += [
            name
            for name, module in modules.items()
            if name not in members and hasattr(module, "finish_loading") and holds(module, held)
        ]
    return tuple(members)


def holds(module: nn.Module, identities: set[int]) -> bool:
    lists = (value for value in module.__dict__.values() if isinstance(value, list))
    return any(id(item) in identities for value in lists for item in value)


class Renewal:
    """New weights for one part. `targets`: where they go, by name: the module's own tensors, or empty ones
    beside them where it is packed. `finish` brings what was packed to its place."""

    def __init__(self, live: nn.Module, blueprint: nn.Module, part: Part, device: torch.device) -> None:
        self._live, self._part, self._device = live, part, device
        self._names = {id(module): name for name, module in blueprint.named_modules()}
        self._clones: dict[str, nn.Module] = {}
        for name in part.modules:
            if name not in self._clones:  # it may be inside another one
                self._clone(name, blueprint.get_submodule(name))
        for clone in self._clones.values():
            for key, value in clone.__dict__.items():
                if isinstance(value, list) and any(isinstance(item, nn.Module) for item in value):
                    clone.__dict__[key] = [self._counterpart(item) for item in value]
        self._order = [name for name in reversed(self._names.values()) if name in part.modules]
        live_targets = {
            name: tensor for name, tensor in parameters(live).items() if is_of(name, part.parameters)
        }
        self.targets: dict[str, Tensor] = live_targets if not part.packed else dict(self._empty())

    def _clone(self, name: str, planned: nn.Module) -> nn.Module:
        clone: nn.Module = object.__new__(type(planned))
        self._clones[name] = clone
        clone.__dict__.update(planned.__dict__)
        live = self._live.get_submodule(name)
        packs = getattr(planned, "packs", None)
        for kind in ("_parameters", "_buffers"):
            clone.__dict__[kind] = {
                key: self._room(tensor)
                if self._part.packed and tensor is not None and (packs is None or is_of(key, packs))
                else getattr(live, kind).get(key)
                for key, tensor in getattr(planned, kind).items()
            }
        clone.__dict__["_modules"] = {
            key: self._child(f"{name}.{key}", child, packs is None or key in packs)
            for key, child in planned._modules.items()
        }
        return clone

    def _child(self, name: str, planned: nn.Module | None, is_packed: bool) -> nn.Module | None:
        """The live one, unless its parameters are packed with this part."""
        if planned is None:
            return None
        if name not in self._part.modules and (hasattr(planned, "finish_loading") or not is_packed):
            return self._live.get_submodule(name)
        return self._clones[name] if name in self._clones else self._clone(name, planned)

    def _room(self, tensor: Tensor) -> Tensor:
        empty = torch.empty_like(tensor, device=self._device)
        return nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty

    def _counterpart(self, planned: Any) -> Any:
        name = self._names.get(id(planned))
        return planned if name is None else self._clones.get(name) or self._live.get_submodule(name)

    def _empty(self) -> Iterator[tuple[str, Tensor]]:
        for name, clone in self._clones.items():
            for kind in (clone._parameters, clone._buffers):
                yield from ((f"{name}.{key}", tensor) for key, tensor in kind.items() if tensor is not None)

    def finish(self) -> None:
        for name in self._order:
            finish = getattr(self._clones[name], "finish_loading", None)
            if finish is not None:
                finish()
        done: set[tuple[int, int]] = set()
        for name, clone in self._clones.items():
            overwrite(self._live.get_submodule(name), clone, done)


def is_of(name: str, names: tuple[str, ...]) -> bool:
    """A parameter, or its scales or zeros."""
    return name.removesuffix(SCALE).removesuffix(ZEROS).removesuffix(GLOBAL_SCALE) in names


def overwrite(old: Any, new: Any, done: set[tuple[int, int]]) -> None:
    """Copies all tensors that `new` holds, however deep, to those in the same place in `old`. What a module
    has given up when it was packed has no place."""
    if old is new or old is None or new is None or (id(old), id(new)) in done:
        return
    done.add((id(old), id(new)))
    if isinstance(new, Tensor):
        old.copy_(new)
        return
    old_contents = contents(old)
    for key, value in contents(new).items():
        overwrite(old_contents.get(key), value, done)


def contents(value: Any) -> Mapping[Any, Any]:
    """What an object holds, by names or places."""
    if isinstance(value, nn.Module):
        return value.__dict__ | value._parameters | value._buffers | value._modules
    if isinstance(value, partial):
        return {"args": value.args, **value.keywords}
    if isinstance(value, tuple | list):
        return dict(enumerate(value))
    if is_dataclass(value):
        return {entry.name: getattr(value, entry.name) for entry in fields(value)}
    return value.__dict__ if isinstance(value, ctypes.Structure) else {}


def tensors_in(name: str, value: Any, values: dict[int, Any]) -> Iterator[tuple[str, Tensor]]:
    """All tensors that a value holds, however deep, but those in modules. `values`: those met before, by
    their id. It keeps them alive, since an id may be used again."""
    if id(value) in values or isinstance(value, nn.Module):
        return
    values[id(value)] = value
    if isinstance(value, Tensor):
        yield name, value
    for key, inner in (value if isinstance(value, dict) else contents(value)).items():
        yield from tensors_in(f"{name}.{key}", inner, values)
