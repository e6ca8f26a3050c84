"""Single kernels as models call them, on random data: a call, its result in float64, and what a library takes for the same.

Inputs that a step reads from memory rotate, so that no call finds them in the L2 cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from common.shapes import SHAPES, TOYS
from torch import Tensor

from gpu_kit.calls import Call, Run
from gpu_kit.mixtures import mixture, router
from gpu_kit.models import PAGE, DeviceConfig, arch_of
from gpu_kit.timing import rotation
from mtpserve.core.arch.model import ModelArch

PRODUCTS = ("linear", "gated")  # kinds
PRODUCT_MODELS = ("7b", "0.5b", "30b-a3b", "475m")  # the order in which their products are tuned; others follow


@dataclass(frozen=True, slots=True)
class Workload:
    """`sizes` are the arguments of the function `kind` below."""

    op: str  # as in the table of tilings
    kind: str
    label: str
    rows: int
    sizes: tuple[int, ...]

    def call(self, device_config: DeviceConfig) -> Call:
        return KINDS[self.kind](device_config, self.rows, *self.sizes)


def linear(device_config: DeviceConfig, rows: int, outputs: int, inputs: int) -> Call:
    from mtpserve_kernels.fused.linear import skinny_linear

    weights, x = product_operands(device_config, rows, outputs, inputs)
    copies = len(weights)
    return Call(
        lambda i: skinny_linear(x, weights[i % copies]),
        lambda i: x.double() @ weights[i % copies].double().T,
        (outputs * inputs + rows * (outputs + inputs)) * x.itemsize,
        {"F.linear": lambda i: F.linear(x, weights[i % copies])},
        copies,
    )


def gated(device_config: DeviceConfig, rows: int, outputs: int, inputs: int) -> Call:
    """`outputs`: gates and ups together."""
    from mtpserve_kernels.fused.linear import skinny_gated
    from mtpserve_kernels.fused.silu import silu_mul

    weights, x = product_operands(device_config, rows, outputs, inputs)
    copies = len(weights)

    def exact(i: int) -> Tensor:
        gate, up = (x.double() @ weights[i % copies].double().T).chunk(2, -1)
        return F.silu(gate) * up

    return Call(
        lambda i: skinny_gated(x, weights[i % copies]),
        exact,
        (outputs * inputs + rows * (outputs // 2 + inputs)) * x.itemsize,
        {"F.linear, silu_mul": lambda i: silu_mul(F.linear(x, weights[i % copies]))},
        copies,
    )


def product_operands(device_config: DeviceConfig, rows: int, outputs: int, inputs: int) -> tuple[Tensor, Tensor]:
    """Weights [copies, outputs, inputs] and x [rows, inputs]."""
    copies = 1 if device_config.toy else rotation(outputs * inputs * device_config.dtype.itemsize, least=3, rotated=300e6)
    options: dict[str, Any] = {"device": device_config.device, "dtype": device_config.dtype}
    return torch.randn(copies, outputs, inputs, **options) * inputs**-0.5, torch.randn(rows, inputs, **options)


def norm(device_config: DeviceConfig, rows: int, hidden: int) -> Call:
    from mtpserve_kernels.fused.norm import add_rms_norm

    weight = 1 + 0.1 * torch.randn(hidden, device=device_config.device, dtype=device_config.dtype)
    x, residual = (torch.randn(rows, hidden, device=device_config.device, dtype=device_config.dtype) for _ in range(2))

    def exact(i: int) -> Tensor:
        total = (x + residual).double()  # the kernel rounds the sum, too
        return total * (total.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()

    return Call(lambda i: add_rms_norm(x, residual, weight, 1e-6)[0], exact, 4 * x.nbytes)


def rope(device_config: DeviceConfig, rows: int, heads: int, kv_heads: int, dim: int) -> Call:
    from mtpserve_kernels.fused.rope import rope_store

    device = device_config.device
    places, angles = torch.arange(rows, device=device), torch.rand(rows, dim // 2, device=device) * 6
    cos, sin = angles.cos(), angles.sin()
    qkv = torch.randn(rows, heads + 2 * kv_heads, dim, device=device, dtype=device_config.dtype)
    keys, values = (torch.empty(rows, kv_heads, dim, device=device, dtype=device_config.dtype) for _ in range(2))

    def exact(i: int) -> Tensor:
        first, second = qkv[:, :heads].double().chunk(2, -1)
        c, s = cos.double().unsqueeze(1), sin.double().unsqueeze(1)
        return torch.cat([first * c - second * s, second * c + first * s], -1)

    return Call(lambda i: rope_store(qkv, places, cos, sin, places, keys, values, heads), exact, 2 * qkv.nbytes)


def span(device_config: DeviceConfig, rows: int, width: int, context: int, heads: int, kv_heads: int, dim: int, value: int) -> Call:
    """`rows` of requests with `width` rows each; of the latent layout where `value` is less than `dim`."""
    from mtpserve_kernels.attention.span import span_gqa, span_mla

    device, dtype, latent, requests = device_config.device, device_config.dtype, value < dim, rows // width
    pages = -(-(context + width) // PAGE)
    token = kv_heads * (dim if latent else 2 * dim) * dtype.itemsize
    copies = 1 if device_config.toy else rotation(requests * max(context, width) * token)
    keys = torch.randn(copies * requests * pages * PAGE, kv_heads, dim, device=device, dtype=dtype)
    caches = (keys,) if latent else (keys, torch.randn_like(keys))
    tables = torch.randperm(copies * requests * pages, device=device).view(copies, requests, pages)
    request_ids = torch.arange(requests, device=device)
    index = (context + torch.arange(width, device=device)).repeat(requests)
    q = torch.randn(rows, heads, dim, device=device, dtype=dtype)
    query_start_loc, seq_lens = torch.arange(requests + 1, device=device) * width, torch.full_like(request_ids, context + width)
    where = request_ids, query_start_loc, seq_lens, index, None, None, PAGE
    scale, last = dim**-0.5, (value,) if latent else ()
    values = keys[..., :value] if latent else caches[-1]
    kernel: Any = span_mla if latent else span_gqa

    def exact(i: int) -> Tensor:
        parts = []
        for request in range(requests):
            positions = torch.arange(context + width, device=device)
            slots = tables[i % copies, request, positions // PAGE] * PAGE + positions % PAGE
            k = keys[slots].double().repeat_interleave(heads // kv_heads, 1)
            v = values[slots].double().repeat_interleave(heads // kv_heads, 1)
            scores = torch.einsum("rhd,nhd->hrn", q[request * width : (request + 1) * width].double(), k) * scale
            later = positions > context + torch.arange(width, device=device).unsqueeze(1)
            parts.append(torch.einsum("hrn,nhe->rhe", scores.masked_fill(later, -torch.inf).softmax(-1), v))
        return torch.cat(parts)

    return Call(
        lambda i: kernel(q, *caches, tables[i % copies], *where, scale, *last, width=width),
        exact,
        requests * (context + width) * token + q.nbytes * (1 + value / dim),
        library_attention(device_config, q, requests, width, context, kv_heads, dim, latent),
    )


def library_attention(
    device_config: DeviceConfig, q: Tensor, requests: int, width: int, context: int, kv_heads: int, dim: int, latent: bool
) -> dict[str, Run]:
    """For prompts: what torch has, over keys that lie side by side. The latent layout is compared as it would be without absorption, with
    192 numbers of a key and 128 of a value."""
    if context or width < 2 or device_config.device.type != "cuda":
        return {}
    from torch.nn.attention import SDPBackend, sdpa_kernel

    heads = q.shape[1]
    key_dim, value_dim, kv = (192, 128, heads) if latent else (dim, dim, kv_heads)
    sizes = ((heads, key_dim), (kv, key_dim), (kv, value_dim))
    parts = [torch.randn(requests, count, width, size, device=device_config.device, dtype=device_config.dtype) for count, size in sizes]

    attend: Any = F.scaled_dot_product_attention

    def by(backend: SDPBackend) -> Run:
        def run(i: int) -> Any:
            with sdpa_kernel(backend):
                return attend(*parts, is_causal=True, enable_gqa=kv != heads)

        return run

    backends = {"flash": by(SDPBackend.FLASH_ATTENTION), "cudnn": by(SDPBackend.CUDNN_ATTENTION)}
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return backends
    flat = [part.transpose(1, 2).flatten(0, 1).repeat_interleave(heads // part.shape[1], 1).contiguous() for part in parts]
    ends = torch.arange(requests + 1, device=device_config.device, dtype=torch.int32) * width
    # Newer ones say it as a window.
    causal: dict[str, Any] = {"is_causal": True} if "is_causal" in signature(varlen_attn).parameters else {"window_size": (-1, 0)}
    varlen: Any = varlen_attn
    return backends | {"varlen": lambda i: varlen(*flat, ends, ends, width, width, **causal)}


def sampler(device_config: DeviceConfig, rows: int, nodes: int, vocab: int) -> Call:
    """Greedy verdicts over `nodes` rows of each request, at least one."""
    from mtpserve_kernels.spec.accept import accept

    device, requests = device_config.device, max(rows // nodes, 1)
    logits = torch.randn(requests, nodes, vocab, device=device)
    req_indices, zero = torch.arange(requests, device=device), torch.zeros(requests, device=device)
    drafts = logits[:, :-1].argmax(-1)
    none = torch.zeros_like(req_indices)
    numbers = zero, none, zero + 1, zero, none, torch.ones(requests, dtype=torch.bool, device=device)
    count = torch.full_like(req_indices, nodes - 1)
    return Call(
        lambda i: accept(logits, drafts, count, None, None, req_indices, none, *numbers, None, nodes - 1, all_greedy=True)[0],
        lambda i: logits.argmax(-1).double(),
        logits.nbytes,
        {"argmax": lambda i: logits.argmax(-1)},
    )


KINDS: dict[str, Callable[..., Call]] = {
    "linear": linear, "gated": gated, "norm": norm, "router": router, "mixture": mixture, "grouped": mixture, "span": span,
    "sampler": sampler, "rope": rope,
}  # fmt: skip


def products_of(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """[outputs, inputs] of a layer's products, by name."""
    arch = arch_of(config)
    hidden, heads = arch.hidden, arch.heads
    shapes = {"fuse": (hidden, 2 * hidden)}
    if arch.mla is not None:
        mla, q = arch.mla, heads * (arch.mla.nope + arch.mla.rope)
        shapes |= {"down": ((mla.q_rank or q) + mla.kv_rank + mla.rope, hidden), "out": (hidden, heads * mla.value)}
        return shapes | ({"q_up": (q, mla.q_rank)} if mla.q_rank else {})
    kv = arch.attention(0).kv
    shapes |= {"qkv": ((heads + 2 * kv.heads) * arch.head_dim, hidden), "out": (hidden, heads * arch.head_dim)}
    if arch.moe is None:
        shapes |= {"gate_up": (2 * arch.intermediate, hidden), "mlp_down": (hidden, arch.intermediate)}
    return shapes


def decode_rows(toy: bool) -> tuple[int, ...]:
    """Numbers of rows that the kernels pad to 16: all have the same kernels, compiled once."""
    return (1, 4) if toy else (1, 2, 4, 8, 16)


def span_sizes(toy: bool) -> list[tuple[int, int, int]]:
    """Requests, rows of each, and tokens before them."""
    if toy:
        return [(1, 1, 40), (1, 4, 40)]
    short = [(1, 1, 256), (8, 1, 256), (128, 1, 256), (1, 4, 256), (8, 4, 256), (64, 4, 256)]
    return [*short, (1, 1, 4096), (64, 1, 4096), (1, 4, 4096), (16, 4, 4096)]


def span_workloads(model: str, arch: ModelArch, sizes: Iterable[tuple[int, int, int]]) -> list[Workload]:
    kv = arch.attention(0).kv
    op, shape = "span_gqa" if arch.mla is None else "span_mla", (arch.heads, kv.heads, kv.key_dim, kv.value_dim)
    return [
        Workload(op, "span", f"{model} {requests} x {width}, context {context}", requests * width, (width, context, *shape))
        for requests, width, context in sizes
    ]


def moe_rows(toy: bool) -> tuple[int, ...]:
    """Numbers of rows above decode_rows. From 65 on rows are grouped by expert."""
    return (70,) if toy else (64, 128, 256, 512, 2048)


def moe_workloads(model: str, arch: ModelArch, toy: bool) -> list[Workload]:
    if (moe := arch.moe) is None:
        return []
    from mtpserve_kernels.moe.align import MAX_ROWS

    rows = *decode_rows(toy), *moe_rows(toy)
    sizes = moe.experts, moe.top_k, arch.hidden, moe.size, moe.shared // moe.size
    router_sizes = moe.experts, arch.hidden, moe.top_k, moe.groups, moe.top_groups, int(moe.scores == "softmax")
    mixtures = [
        Workload(op, "mixture" if number <= MAX_ROWS else "grouped", f"{model} {op}", number, sizes)
        for op in ("gate_up", "down")
        for number in rows
    ]
    return [*mixtures, *(Workload("route", "router", f"{model} router", number, router_sizes) for number in rows)]


def product_workloads(models: Iterable[str], toy: bool) -> list[Workload]:
    """Those of few rows, of which most is to be gained first: a 7 B model's layers, then others', then what a drafter's layer has more."""
    order = {name: i for i, name in enumerate(PRODUCT_MODELS)}
    workloads, of_drafter = list[Workload](), list[Workload]()
    for model in sorted(models, key=lambda name: order.get(name, len(order))):
        for name, sizes in products_of((TOYS if toy else SHAPES)[model]).items():
            ops = [("skinny_linear", "linear"), *([("skinny_gated", "gated")] if name == "gate_up" else [])]
            some = [Workload(op, kind, f"{model} {name}", number, sizes) for op, kind in ops for number in decode_rows(toy)]
            (of_drafter if name == "fuse" else workloads).extend(some)
    return [*workloads, *of_drafter]


def row_workloads(model: str, arch: ModelArch, toy: bool) -> list[Workload]:
    """Norms, and rope where heads are grouped: they take milliseconds to measure."""
    many_rows, kv = () if toy else (64, 256, 512), arch.attention(0).kv
    norms = [Workload("add_rms_norm", "norm", f"{model} norm", number, (arch.hidden,)) for number in (*decode_rows(toy), *many_rows)]
    sizes = arch.heads, kv.heads, arch.head_dim
    ropes = [Workload("rope_store", "rope", f"{model} rope", number, sizes) for number in (1, *many_rows)]
    return [*norms, *ropes] if arch.mla is None else norms


def is_prompt(workload: Workload) -> bool:
    return workload.kind == "span" and workload.sizes[1] == 0


def workloads_of(models: list[str], toy: bool) -> list[Workload]:
    """What is tuned, the most promising first; each shape once."""
    over_rows, attention, mixtures, small = list[Workload](), list[Workload](), list[Workload](), list[Workload]()
    for model in models:
        config = (TOYS if toy else SHAPES)[model]
        arch = arch_of(config)
        attention += span_workloads(model, arch, span_sizes(toy))
        mixtures += moe_workloads(model, arch, toy)
        over_rows += row_workloads(model, arch, toy)
        requests = (1,) if toy else (1, 64, 128)
        small += [Workload("accept", "sampler", f"{model} sampler", nodes * n, (nodes, arch.vocab)) for nodes in (1, 4) for n in requests]
    by_shape = dict[tuple[Any, ...], Workload]()
    for workload in (*product_workloads(models, toy), *over_rows, *mixtures, *attention, *small):
        by_shape.setdefault((workload.op, workload.rows, workload.sizes), workload)
    return list(by_shape.values())


def prompt_workloads(models: list[str], toy: bool) -> list[Workload]:
    """Attention of whole prompts, of one request each."""
    workloads = list[Workload]()
    for model in models:
        arch = arch_of((TOYS if toy else SHAPES)[model])
        workloads += span_workloads(model, arch, [(1, width, 0) for width in ((24,) if toy else (512, 2048, 8192))])
    return [replace(workload, label=f"{workload.label.split()[0]} prompt of {workload.rows}") for workload in workloads]
