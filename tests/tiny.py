"""A tiny random model in a real engine, made without a checkpoint: what the step does is tested on it, in seconds."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
from mtpserve_kernels.cache import reference

from mtpserve.attention.exact import ExactAttention
from mtpserve.attention.registry import BACKENDS
from mtpserve.cache.pages import PageAllocator
from mtpserve.cache.pool import KVPool
from mtpserve.config import SchedulerConfig, SpecConfig
from mtpserve.core.arch import KVLayout, MLAArch, ModelArch, MoEArch, MTPArch, RopeArch
from mtpserve.core.protocols import Drafter, GrammarCompiler, LogitsProcessor
from mtpserve.core.request import Request
from mtpserve.core.sampling import SamplingParams
from mtpserve.engine.build import KERNELS
from mtpserve.engine.drafters import make_drafter, reduced_head
from mtpserve.engine.engine import Engine
from mtpserve.layers.decoder import DecoderModel
from mtpserve.layers.kernels import triton_kernels, use_kernels
from mtpserve.models import deepseek, mimo
from mtpserve.quant.unquantized import Unquantized
from mtpserve.runtime.exact import ExactModel
from mtpserve.runtime.graphs import Recorder, StepGraphs
from mtpserve.runtime.rules import LogitRules
from mtpserve.runtime.runner import Runner
from mtpserve.runtime.sampling import SeatSampling
from mtpserve.runtime.seats import SeatTensors
from mtpserve.runtime.step import Judge, Step
from mtpserve.spec.accept import LOSSLESS, Decide, decide
from mtpserve.spec.synthetic import SyntheticAcceptance
from mtpserve.spec.thresholds import Thresholds

CPU = torch.device("cpu")
VOCAB, CONTEXT = 37, 160


def tiny_arch(family: str = "deepseek") -> ModelArch:
    latent = family == "deepseek"
    return ModelArch(
        family=family,
        num_layers=2,
        hidden=32,
        vocab=VOCAB,
        heads=4,
        head_dim=24 if latent else 8,
        intermediate=48,
        kv=KVLayout("mla", 1, 24, 16) if latent else KVLayout("gqa", 2, 8, 8),
        rope=RopeArch(8, 10000.0, interleaved=latent),
        norm_eps=1e-6,
        scale=0.2,
        max_positions=CONTEXT,
        tied_head=False,
        eos_ids=(),
        dtype="float32",
        mla=MLAArch(24, 16, 16, 8, 12) if latent else None,
        moe=MoEArch(8, 2, 16, 1, first_dense=1, groups=4, top_groups=2, scale=1.5, renormalise=True) if latent else None,
        mtp=MTPArch(1, "embedding-hidden", "post", "post") if latent else MTPArch(1, "hidden-embedding", "pre", "pre"),
        qkv_bias=not latent,
    )


def tiny_model(family: str = "deepseek", seed: int = 0, dtype: torch.dtype = torch.float32) -> DecoderModel:
    build = deepseek.build if family == "deepseek" else mimo.build
    model = build(tiny_arch(family), Unquantized(), dtype, CONTEXT + 160)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = 1 + 0.2 * noise if "norm" in name else noise * (0.7 if name == "embed.weight" else parameter.shape[-1] ** -0.5)
        if "router" not in name:
            parameter.data = parameter.data.to(dtype)
    for part in model.modules():
        if hasattr(part, "finish_loading"):
            part.finish_loading()
    return model.eval()


def tiny_drafter(model: DecoderModel, attention: Any, drafts: int | SpecConfig, budget: int, token_map: list[int] | None = None) -> Drafter:
    """`drafts` is the depth of a chain, or any configuration."""
    if isinstance(drafts, int):
        drafts = SpecConfig(speculative_algorithm="MTP", speculative_num_steps=drafts) if drafts else SpecConfig()
    return make_drafter(drafts, model, attention, budget, reduced_head(model, token_map, model.embed.weight.device))


def kernels_of(model: DecoderModel) -> tuple[str, Any, Decide | None]:
    """The layers use them from here on. → the attention backend, `compact` and `decide`."""
    use_kernels(model, triton_kernels())
    compact, judge = (getattr(import_module(KERNELS[name]), name) for name in ("compact", "decide"))
    return "triton", compact, judge


def tiny_engine(
    model: DecoderModel,
    drafts: int | SpecConfig,
    *,
    pages: int = 400,
    page_size: int = 4,
    budget: int = 64,
    seats: int = 16,
    eos: tuple[int, ...] = (),
    processors: Sequence[LogitsProcessor] = (),
    thresholds: Thresholds = LOSSLESS,
    processed_logprobs: bool = False,
    grammars: GrammarCompiler | None = None,
    exact: bool = False,
    kernels: bool = False,
    overlap: int = 0,
    recorder: Recorder | None = None,
    token_map: list[int] | None = None,
    rates: Sequence[float] | None = None,
    cache: torch.dtype | None = None,
    device: torch.device = CPU,
) -> Engine:
    """`cache`: what keys and values are stored in. The model is moved to `device`.

    The pool is full of NaN: whatever reads a slot that was not written fails its request."""
    arch = model.to(device).arch
    backend, compact, judge = kernels_of(model) if kernels else ("reference", reference.compact, None)
    dtype = model.embed.weight.dtype
    pool = KVPool(arch.kv, arch.kv_layers, pages + 1, page_size, dtype, device, poison=True, compact=compact, stored=cache)
    pool.clear(pages)
    attention = BACKENDS.get(backend)(pool, arch.heads, arch.scale)
    drafter = tiny_drafter(model, attention, drafts, budget, token_map)
    if rates is not None:
        judge = SyntheticAcceptance(judge or decide, rates, device)
    state = SeatTensors(seats, CONTEXT, drafter, arch.vocab, page_size, device, eos, pages)
    sampling = SeatSampling(seats, LogitRules(state, seats, arch.vocab, eos, processors, device), device)
    step = Step(
        ExactModel(model) if exact else model,
        ExactAttention(pool, arch.heads, arch.scale) if exact else attention,
        pool,
        drafter,
        state,
        Judge(thresholds, processed_logprobs, judge),
    )
    graphs = None if recorder is None else StepGraphs(step, sampling, recorder, seats)
    return Engine(
        Runner(step, sampling, graphs, overlapped=overlap > 0),
        SchedulerConfig(chunked_prefill_size=budget),
        allocator=PageAllocator(pages),
        page_size=page_size,
        max_running=seats,
        context_length=CONTEXT,
        vocab=arch.vocab,
        eos_ids=eos,
        want=drafts if isinstance(drafts, int) else drafts.steps,
        grammars=grammars,
        overlap=overlap,
    )


def run(engine: Engine, prompts: Sequence[list[int]], params: SamplingParams | Sequence[SamplingParams]) -> list[list[int]]:
    """All prompts at once; the tokens of each. A request that fails fails the test."""
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    for i, (prompt, sampling) in enumerate(zip(prompts, each, strict=True)):
        engine.add(Request(str(i), prompt, sampling))
    tokens: list[list[int]] = [[] for _ in prompts]
    while engine.has_work:
        for event in engine.step():
            assert event.error is None, event.error
            tokens[int(event.id)] += event.tokens
    engine.check_integrity()
    assert engine.stats.pages_used == 0
    return tokens


def prompts(count: int, seed: int = 0, longest: int = 30) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest, (count,), generator=generator).tolist()
    return [torch.randint(VOCAB, (n,), generator=generator).tolist() for n in lengths]
