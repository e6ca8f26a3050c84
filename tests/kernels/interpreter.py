"""Triton's interpreter in less time, with the same results.

- It patches `triton.language` at each call of a device function: once in a launch is enough.
- It reduces by a function of ours number by number: here neighbours are combined, half a block at once, as on a GPU.
- It works out anew for each block what follows from its type and its shape: here that is kept.
- It computes each sum and product of integers a second time in 64 bits, for an assertion that only its debug mode makes.
- It looks for the common type and shape of two operands also where both have the same ones, as most have.

Where a release of Triton has other names inside, its interpreter stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, wraps
from typing import Any

import numpy as np
from triton.language import core, semantic
from triton.runtime import interpreter

NEEDED = ("_patch_lang", "_LangPatchScope", "_get_np_dtype", "ReduceOps", "_patch_attr", "interpreter_builder", "interpreter_semantic")


class Patches:
    """In the place of interpreter._patch_lang: the modules of the language that the running launch has patched."""

    def __init__(self, patch: Callable[[Any], Any]) -> None:
        self.patch = patch
        self.patched = set[int]()
        self.languages = cache(self._languages)

    def _languages(self, function: Any) -> frozenset[int]:
        known = {id(core), id(interpreter.tl)}
        return frozenset(known & {id(value) for value in function.__globals__.values()})

    def __call__(self, function: Any) -> Any:
        languages = self.languages(function)
        if languages and languages <= self.patched:
            return interpreter._LangPatchScope()
        outermost, scope = not self.patched, self.patch(function)
        self.patched |= languages
        if outermost:
            restore = scope.restore

            def restored() -> None:
                restore()
                self.patched.clear()

            scope.restore = restored
        return scope


def reduce(self: Any, tensors: Any) -> list[Any]:
    """In the place of ReduceOps.generic_reduce. Blocks have powers of two of numbers."""
    given, axis = self.unravel(tensors, self.axis)
    blocks = [np.moveaxis(tensor.handle.data, axis, 0) for tensor in given]
    while len(blocks[0]) > 1:
        operands = [self.to_tensor(block[side::2], tensor.dtype) for side in (0, 1) for block, tensor in zip(blocks, given, strict=True)]
        combined = self.combine_fn.fn(*operands)
        blocks = [part.handle.data for part in (combined if isinstance(combined, tuple) else (combined,))]
    found = []
    for block, tensor in zip(blocks, given, strict=True):
        numbers = block[0]
        if self.keep_dims:
            numbers = numbers.reshape((1,) * tensors[0].handle.data.ndim) if self.axis is None else np.expand_dims(numbers, axis)
        found.append(self.to_tensor(numbers, tensor.dtype))
    return found


def numpy_type(of: Callable[[Any], Any]) -> Callable[[Any], Any]:
    known = dict[str, Any]()

    def get(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in known:
            known[name] = of(kind)
        return known[name]

    return get


def tensor(init: Callable[[Any, Any, Any], None]) -> Callable[[Any, Any, Any], None]:
    known = dict[str, dict[str, Any]]()

    def new(self: Any, handle: Any, type: Any) -> None:
        if (same := known.get(type.name)) is None:
            init(self, handle, type)
            known[type.name] = dict(self.__dict__)
        else:
            self.__dict__.update(same, handle=handle, type=type, dtype=type.scalar)

    return new


def block_type(init: Callable[[Any, Any, Any], None]) -> Callable[[Any, Any, Any], None]:
    known = dict[Any, dict[str, Any]]()

    def new(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, *(getattr(size, "value", size) for size in shape)
        if (same := known.get(key)) is None:
            init(self, element_ty, shape)
            known[key] = dict(self.__dict__)
        else:
            self.__dict__.update(same, element_ty=element_ty)

    return new


def equal(original: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    """In the place of dtype.__eq__."""
    return lambda self, other: self is other or original(self, other)


def common_type(original: Callable[..., tuple[Any, Any]]) -> Callable[..., tuple[Any, Any]]:
    """In the place of TritonSemantic.binary_op_type_checking_impl."""
    result_types = dict[Any, tuple[Any, Any]]()  # of two types, or of a type and a number

    def cast(self: Any, value: Any, dtype: Any) -> Any:
        if type(value) is not core.tensor:
            return self.scalar_constant(value, dtype)
        return value if value.dtype.name == dtype.name else self.cast(value, dtype)

    @wraps(original)
    def operands(self: Any, lhs: Any, rhs: Any, *flags: bool, **options: bool) -> tuple[Any, Any]:
        if type(lhs) is not core.tensor or type(rhs) not in (core.tensor, bool, int, float):
            return original(self, lhs, rhs, *flags, **options)
        key = lhs.dtype.name, rhs.dtype.name if type(rhs) is core.tensor else (type(rhs), rhs), flags, *options.items()
        if (types := result_types.get(key)) is None:
            tensors = original(self, lhs, rhs, *flags, **options)
            result_types[key] = tensors[0].dtype, tensors[1].dtype
            return tensors
        return tuple(self.broadcast_impl_value(cast(self, lhs, types[0]), cast(self, rhs, types[1])))

    return operands


def common_shape(original: Callable[..., tuple[Any, Any]]) -> Callable[..., tuple[Any, Any]]:
    """In the place of TritonSemantic.broadcast_impl_value."""

    @wraps(original)
    def operands(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        left, right = lhs.handle.data.shape, rhs.handle.data.shape
        num_blocks = lhs.type.is_block() + rhs.type.is_block()  # a number has a shape of (1,) in the interpreter, as a block of one has
        if left == right and num_blocks != 1:
            return lhs, rhs
        if num_blocks < 2 or len(left) != len(right) or any(m != n and 1 not in (m, n) for m, n in zip(left, right, strict=True)):
            return original(self, lhs, rhs)
        shape = [max(sizes) for sizes in zip(left, right, strict=True)]
        return tuple(
            operand
            if list(operand.handle.data.shape) == shape
            else core.tensor(self.builder.create_broadcast(operand.handle, shape), core.block_type(operand.dtype, shape))
            for operand in (lhs, rhs)
        )

    return operands


def patch_attribute(owner: Any, name: str, builtin: Any, builder: Any, scope: Any) -> None:
    """In the place of interpreter._patch_attr: without the check that there are semantics, which are added here."""
    function = getattr(builtin, "__wrapped__", builtin)

    def call(*arguments: Any, **options: Any) -> Any:
        options["_semantic"] = interpreter.interpreter_semantic
        return function(*arguments, **options)

    scope.set_attr(owner, name, call)


def quicken() -> None:
    if any(not hasattr(interpreter, name) for name in NEEDED) or isinstance(interpreter._patch_lang, Patches):
        return
    interpreter._patch_lang = Patches(interpreter._patch_lang)
    interpreter._patch_attr = patch_attribute
    interpreter._get_np_dtype = numpy_type(interpreter._get_np_dtype)
    interpreter.ReduceOps.generic_reduce = reduce
    core.tensor.__init__ = tensor(core.tensor.__init__)
    core.block_type.__init__ = block_type(core.block_type.__init__)
    core.dtype.__eq__ = equal(core.dtype.__eq__)
    semantic.TritonSemantic.binary_op_type_checking_impl = common_type(semantic.TritonSemantic.binary_op_type_checking_impl)
    semantic.TritonSemantic.broadcast_impl_value = common_shape(semantic.TritonSemantic.broadcast_impl_value)
    options = interpreter.interpreter_builder.options
    interpreter.interpreter_builder.options = replace(options, sanitize_overflow=options.sanitize_overflow and options.debug)
