"""The kernels of each device and what they are compared with. A case names the function, its reference and its input."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mtpserve_kernels.moe import reference as moe
from mtpserve_kernels.quant.reference import widen_rows
from mtpserve_kernels.self_test import inputs
from mtpserve_kernels.self_test.inputs import Random

TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 1e-3, torch.float8_e4m3fn: 0.0}  # absolute for numbers below 1, relative above

Kernel = Callable[..., Any]


def gated(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The reference of skinny_gated: weight [2 S, K], gates and then ups."""
    gate, up = F.linear(x.float(), weight.float(), bias.float()).chunk(2, -1)
    return (F.silu(gate) * up).to(x.dtype)


def linear_rows(x: Tensor, weight: Tensor, scale: Tensor, zeros: Tensor) -> Tensor:
    return (x.float() @ widen_rows(weight, scale, zeros, None).T).to(x.dtype)


def cpu_linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    from mtpserve_kernels.cpu.linear import linear, pack

    return linear(x, pack(weight.clone(), bias))


def cpu_route(x: Tensor, weight: Tensor, bias: Tensor, *rule: Any) -> tuple[Tensor, Tensor]:
    from mtpserve_kernels.cpu.moe import pack_router, route

    return route(x, pack_router(weight.clone(), bias, *rule))


def cpu_experts(
    x: Tensor, weights: Tensor, topk_ids: Tensor, gate_up: Tensor, down: Tensor, shared_gate_up: Tensor, shared_down: Tensor
) -> Tensor:
    from mtpserve_kernels.cpu.linear import pack
    from mtpserve_kernels.cpu.moe import experts_of, mix_experts, pack_expert_pair

    routed = pack_expert_pair(gate_up.clone(), down.clone())
    shared = pack(shared_gate_up.clone()), pack(shared_down.clone())
    return mix_experts(x, weights, topk_ids, experts_of(routed, shared))


def sorted_experts(kernel: Kernel) -> Kernel:
    """An order among equal experts is nobody's promise."""

    def run(*arguments: Any) -> tuple[Tensor, Tensor]:
        weights, experts = kernel(*arguments)
        order = experts.argsort(-1)
        return weights.gather(1, order), experts.gather(1, order).long()

    return run


def counted(kernel: Kernel) -> Kernel:
    """What follows the first `counts` slots of a row is void."""

    def run(*arguments: Any) -> tuple[Tensor, Tensor]:
        slots, counts = kernel(*arguments)
        void = torch.arange(slots.shape[1], device=slots.device) >= counts.unsqueeze(1)
        return slots.masked_fill(void, -1), counts

    return run


def filled(kernel: Kernel) -> Kernel:
    """The last row is where the reference puts what belongs nowhere."""

    def run(rows: Tensor, *arguments: Any) -> Tensor:
        kernel(rows, *arguments)
        rows[-1] = 0
        return rows

    return run


def committed(kernel: Kernel) -> Kernel:
    """Of a verdict, what follows the accepted tokens and the one after them is void."""

    def run(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        tokens, accepted, _, failed = kernel(*arguments)
        void = torch.arange(tokens.shape[1], device=tokens.device) > accepted.unsqueeze(1)
        return tokens.masked_fill(void, -1), accepted, failed

    return run


class KernelCase(NamedTuple):
    """`module:function` of each: "" where the device has none of its own, or does not use one. All take the same arguments, of which
    they may change tensors."""

    name: str
    triton: str
    cpu: str | Kernel
    reference: str | Kernel
    arguments: Callable[[Random], tuple[Any, ...]]
    view: Callable[[Kernel], Kernel] = lambda kernel: kernel  # the part of the results that means something


GQA, MLA = (2, 64, 64, 6), (1, 576, None, 4)
CASES = [
    KernelCase(
        "add_rms_norm", "fused.norm:add_rms_norm", "cpu.fused:add_rms_norm", "fused.reference:add_rms_norm",
        lambda random: (random.normal(3, 1000), random.normal(3, 1000), random.normal(1000), 1e-6),
    ),
    KernelCase(
        "silu_mul", "fused.silu:silu_mul", "cpu.fused:silu_mul", "fused.reference:silu_mul", lambda random: (random.normal(3, 2 * 192),)
    ),
    KernelCase("rope_store", "fused.rope:rope_store", "cpu.fused:rope_store", "fused.reference:rope_store", inputs.rope_store),
    KernelCase("latent_store", "fused.rope:latent_store", "cpu.fused:latent_store", "fused.reference:latent_store", inputs.latent_store),
    KernelCase("linear", "fused.linear:skinny_linear", cpu_linear, "fused.reference:linear", inputs.linear),
    KernelCase("linear, gated", "fused.linear:skinny_gated", "", gated, inputs.linear),
    KernelCase("linear_fp8", "quant.linear_fp8:linear_fp8", "", "quant.reference:linear_fp8", inputs.linear_fp8),
    KernelCase("linear_rows", "quant.rows:linear_rows", "", linear_rows, inputs.linear_rows),
    KernelCase("add_lora", "lora.grouped:add_lora", "cpu.lora:add_lora", "lora.reference:add_lora", inputs.add_lora),
    KernelCase("route", "moe.route:route", cpu_route, moe.route, inputs.route, sorted_experts),
    KernelCase("experts, 3 rows", "moe.experts:experts", cpu_experts, moe.experts, partial(inputs.experts, rows=3)),
    KernelCase("experts, 70 rows", "moe.experts:experts", cpu_experts, moe.experts, partial(inputs.experts, rows=70)),
    *[
        KernelCase(f"{name}{', tree' if tree else ''}", f"attention.span:{name}", f"cpu.attention:{name}", f"attention.reference:{name}",
                   partial(inputs.spans, shape=shape, tree=tree))
        for name, shape in (("span_gqa", GQA), ("span_mla", MLA)) for tree in (False, True)
    ],
    KernelCase("select", "attention.select:select", "", "attention.reference:select", inputs.select, counted),
    KernelCase("selected_mla", "attention.select:selected_mla", "", "attention.reference:selected_mla", inputs.selected_mla),
    KernelCase("recur", "recurrent.delta:recur", "cpu.recurrent:recur", "recurrent.reference:recur", inputs.recur),
    KernelCase("slots", "cache.slots:slots", "cpu.requests:slots", "cache.reference:slots", inputs.slots),
    KernelCase("compact", "cache.compact:compact", "cpu.cache:compact", "cache.reference:compact", inputs.compact),
    KernelCase("store_boundary", "cache.slots:store_boundary", "", "cache.reference:store_boundary", inputs.store_boundary, filled),
    *[
        KernelCase(name, f"requests.step:{name}", f"cpu.requests:{name}", f"requests.reference:{name}", arguments)
        for name, arguments in (
            ("place", inputs.place), ("following", inputs.following), ("hold", inputs.hold), ("advance", inputs.advance),
        )
    ],
    *[
        KernelCase(f"accept{', tree' if tree else ''}", "spec.accept:accept", "cpu.accept:accept", "spec.reference:accept",
                   partial(inputs.accept, tree=tree), committed)
        for tree in (False, True)
    ],
    KernelCase("draw", "spec.draw:draw", "cpu.accept:draw", "spec.reference:draw", inputs.draw),
    KernelCase(
        "argmax", "spec.argmax:argmax", "cpu.accept:argmax", "spec.reference:argmax", lambda random: (random.floats(4, 5_000),)
    ),
]  # fmt: skip


def function_of(name: str | Kernel) -> Kernel:
    if callable(name):
        return name
    module, function = name.split(":")
    kernel: Kernel = getattr(import_module(f"mtpserve_kernels.{module}"), function)
    return kernel


def moved(value: Any, device: torch.device) -> Any:
    """Copies of all tensors, also of those in tuples and dataclasses, on the device. Two names of one tensor stay one tensor."""
    if isinstance(value, Tensor):
        return value.to(device, copy=True)
    if isinstance(value, tuple):
        parts = [moved(part, device) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: moved(getattr(value, field.name), device) for field in fields(value)})
    return value


def tensors_of(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value.cpu()
    elif isinstance(value, tuple):
        for part in value:
            yield from tensors_of(part)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_of(getattr(value, field.name))


@dataclass(frozen=True, slots=True)
class KernelDifference:
    error: float  # the largest difference, over max(1, |expected|); infinite where whole numbers, NaN or shapes differ
    tolerance: float  # 0: whole numbers

    @property
    def good(self) -> bool:
        return self.error <= self.tolerance  # of NaN it is false


def difference(actual: Tensor, expected: Tensor) -> KernelDifference:
    if actual.shape != expected.shape:
        return KernelDifference(float("inf"), 0.0)
    if not expected.is_floating_point():
        return KernelDifference(0.0 if torch.equal(actual.long(), expected.long()) else float("inf"), 0.0)
    tolerance = TOLERANCE[expected.dtype]
    actual, expected = actual.double(), expected.double()
    if not torch.equal(actual.isnan(), expected.isnan()):
        return KernelDifference(float("inf"), tolerance)
    actual, expected = actual.nan_to_num(), expected.nan_to_num()
    errors = (actual - expected).abs() / expected.abs().clamp(min=1)
    return KernelDifference(float(errors.max()) if errors.numel() else 0.0, tolerance)


def compare(case: KernelCase, kernel: Kernel, device: torch.device, dtype: torch.dtype, seed: int = 0) -> KernelDifference:
    """The worst difference of what the kernel returns and of what it changes. Raises what the kernel raises."""
    arguments = case.arguments(Random(seed, dtype))
    here, there = moved(arguments, torch.device("cpu")), moved(arguments, device)
    expected = case.view(function_of(case.reference))(*here)
    actual = case.view(kernel)(*there)
    pairs = zip(tensors_of((actual, there)), tensors_of((expected, here)), strict=True)
    return max((difference(*pair) for pair in pairs), key=lambda worst: (not worst.good, worst.error))
