"""A tiny random model in a real engine, made without a checkpoint: what the step does is tested on it, in seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch

from mtpserve.config import EngineConfig, SamplingConfig, SchedulerConfig, SpecConfig
from mtpserve.core.arch.gates import ClampedGate
from mtpserve.core.arch.latent import IndexerArch, MLAArch
from mtpserve.core.arch.model import (
    Attention,
    FeedForward,
    KVLayout,
    ModelArch,
    MoEArch,
    MTPArch,
    Recurrent,
    Selected,
    page_groups,
    recurrent_kinds,
)
from mtpserve.core.arch.rope import RopeArch
from mtpserve.core.request import Request
from mtpserve.core.sampling import SamplingParams
from mtpserve.engine.engine import Engine
from mtpserve.engine.startup.assemble import EngineOptions, EngineSizes, assemble
from mtpserve.engine.startup.compute import why_not_cpu
from mtpserve.layers.decoder import DecoderModel, Methods
from mtpserve.layers.kernels import KERNELS, Kernels
from mtpserve.models import deepseek, gqa, nemotron_h, qwen3_next
from mtpserve.quant.unquantized import Unquantized
from mtpserve.runtime.graphs.capture import GraphCapturer
from mtpserve.runtime.graphs.graphs import StepGraphs

CPU, VOCAB, CONTEXT = torch.device("cpu"), 37, 160
BACKENDS = WeakKeyDictionary[DecoderModel, str]()  # the attention that goes with a tiny model's kernels


def tiny_arch(family: str = "deepseek", layers: int = 2, window: int | None = None) -> ModelArch:
    """`window`: of every second layer of the trunk. "sparse" is a "deepseek" that attends to 10 selected tokens."""
    latent, sparse = family in ("deepseek", "sparse"), Selected(10, 12) if family == "sparse" else None
    kv = KVLayout("mla", 1, 24, 16) if latent else KVLayout("gqa", 2, 8, 8)
    arch = ModelArch(
        family=family,
        layers=(*(Attention(kv, window if i % 2 else None, sparse) for i in range(layers)), Attention(kv, None, sparse)),
        hidden=32,
        vocab=VOCAB,
        heads=4,
        head_dim=24 if latent else 8,
        intermediate=48,
        rope=RopeArch(8, 10000.0, interleaved=latent),
        norm_eps=1e-6,
        scale=0.2,
        max_positions=CONTEXT,
        tied_head=False,
        eos_ids=(),
        dtype="float32",
        mla=MLAArch(24, 16, 16, 8, 12) if latent else None,
        indexer=IndexerArch(12, interleaved=False) if sparse else None,
        moe=MoEArch(8, 2, 16, 16, dense=(0,), groups=4, top_groups=2, scale=1.5, renormalise=True) if latent else None,
        mtp=MTPArch(1, "embedding-hidden", "post", "post") if latent else MTPArch(1, "hidden-embedding", "pre", "pre"),
        qkv_bias=not latent,
    )
    # Heads that are normed: in one half of each is rotated, the other one has a softmax over experts and gates its shared one.
    if family == "glm":
        moe = MoEArch(8, 2, 16, 16, dense=(0,), groups=1, top_groups=1, scale=1.5, renormalise=True)
        return replace(arch, rope=RopeArch(4, 10000.0, interleaved=False), head_norms=True, moe=moe)
    # An MTP layer for each depth.
    if family == "modules":
        return replace(
            arch, layers=(*arch.layers, *arch.layers[-1:] * 6), mtp=MTPArch(7, "embedding-hidden", "post", recycle=None, each_depth=True)
        )
    # The same, each with the output of the one before it, and with a head of its own.
    if family == "chained":
        mtp = MTPArch(3, "embedding-hidden", "pre", recycle="pre", head="own", each_depth=True)
        return replace(arch, layers=(*arch.layers, *arch.layers[-1:] * 2), mtp=mtp, head_gate=True)
    # Sinks, and experts with biases and a gate of their own.
    if family == "oss":
        gate = ClampedGate(1.702, 0.8, 0.8, 1.0)
        moe = MoEArch(8, 2, 16, 0, (0,), 1, 1, 1.0, True, scores="softmax", router_bias="logits", biases=True, gate=gate)
        return replace(arch, sinks="all", out_bias=True, moe=moe)
    if family == "qwen":
        moe = MoEArch(8, 2, 16, 32, (0,), 1, 1, scale=1.0, renormalise=False, scores="softmax", router_bias=None, shared_gate=True)
        return replace(arch, head_norms=True, out_bias=True, moe=moe)
    if family == "hybrid":
        recurrent = Recurrent(key_heads=2, value_heads=4, key_dim=6, value_dim=10, taps=4)
        trunk = (kind if i % 2 else recurrent for i, kind in enumerate(arch.layers[:-1]))
        post = MTPArch(1, "embedding-hidden", "post", "post")
        return replace(arch, layers=(*trunk, arch.layers[-1]), head_norms=True, out_gate=True, qkv_bias=False, mtp=post)
    # Each layer is one block, so that there are twice as many: Mamba-2, experts without a gate, attention without rotation.
    if family == "mamba2":
        mamba = Recurrent(key_heads=2, value_heads=4, key_dim=6, value_dim=10, taps=4, rule="mamba2", conv_bias=True)
        moe = MoEArch(8, 2, 16, 24, (), 1, 1, scale=1.5, renormalise=True, gate="relu2", latent=20)
        blocks = [(mamba, FeedForward(), arch.layers[0], FeedForward())[i % 4] for i in range(2 * layers)]
        mtp = MTPArch(1, "embedding-hidden", "post", "post")
        none = RopeArch(0, 1.0, interleaved=False)
        return replace(arch, layers=(*blocks, arch.layers[-1]), rope=none, qkv_bias=False, gate="relu2", moe=moe, mtp=mtp)
    return arch


def built(family: str, kernels: Kernels, dtype: torch.dtype = torch.float32, **arch: Any) -> DecoderModel:
    """Its weights are still to be filled."""
    builds = {"deepseek": deepseek.build, "sparse": deepseek.build, "hybrid": qwen3_next.build, "mamba2": nemotron_h.build}
    build = builds.get(family, gqa.build)
    return build(tiny_arch(family, **arch), Methods.all(Unquantized(kernels)), dtype, CONTEXT + 160, kernels)


@cache
def default_kernels() -> str:
    """The kernels that compute tiny models by default: the CPU's own take half the time of plain torch's, and need a compiler."""
    return "cpu" if why_not_cpu(EngineConfig(), CPU) is None else "torch"


def tiny_model(
    family: str = "deepseek", seed: int = 0, dtype: torch.dtype = torch.float32, kernels: str | None = None, **arch: Any
) -> DecoderModel:
    """`kernels`: of layers/kernels, default: default_kernels(); "triton" and "exact" need their own engine. `arch`: tiny_arch's."""
    kernels = kernels or default_kernels()
    model = finished(filled(built(family, KERNELS.get(kernels)(), dtype, **arch), seed, dtype))
    BACKENDS[model] = "cpu" if kernels == "cpu" else "reference"
    return model


def filled(model: DecoderModel, seed: int = 0, dtype: torch.dtype = torch.float32) -> DecoderModel:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = 1 + 0.2 * noise if "norm" in name else noise * (0.7 if name == "embed.weight" else parameter.shape[-1] ** -0.5)
        if not any(part in name for part in ("router", "sinks", "decay", "key_norm")):
            parameter.data = parameter.data.to(dtype)
    return model


def finished(model: DecoderModel) -> DecoderModel:
    """As after a load."""
    for part in reversed(list(model.modules())):
        if hasattr(part, "finish_loading"):
            part.finish_loading()
    return model.eval()


def spec_of(drafts: int | SpecConfig) -> SpecConfig:
    """`drafts` is the depth of a chain, or any configuration."""
    if not isinstance(drafts, int):
        return drafts
    return SpecConfig(speculative_algorithm="MTP", speculative_num_steps=drafts) if drafts else SpecConfig(speculative_algorithm="none")


def tiny_engine(
    model: DecoderModel,
    drafts: int | SpecConfig,
    *,
    pages: int = 400,
    window_pages: int = 400,
    page_size: int = 4,
    budget: int = 64,
    seats: int = 16,
    states: int = 8,
    eos: tuple[int, ...] = (),
    exact: bool = False,
    adaptive: bool = False,
    processed_logprobs: bool = False,
    backend: str | None = None,
    recorder: GraphCapturer | None = None,
    device: torch.device = CPU,
    **options: Any,
) -> Engine:
    """`options` are those of EngineOptions; the model is moved to `device`. `backend` None: the one that goes with the model's kernels.

    The pool is full of NaN: whatever reads a slot that was not written fails its request."""
    return assemble(
        model if device == CPU else finished(model.to(device)),  # what is made of the weights is made again there
        EngineSizes(
            pages=[pages, window_pages][: len(page_groups(model.arch.layers))],
            page_size=page_size,
            max_num_reqs=seats,
            context=CONTEXT,
            states=states if recurrent_kinds(model.arch.layers) else 0,
        ),
        EngineOptions(
            spec=replace(spec_of(drafts), speculative_exact=exact, speculative_adaptive=adaptive),
            scheduler=SchedulerConfig(chunked_prefill_size=budget, schedule_conservativeness=0.0),  # more is preempted, and tested
            sampling=SamplingConfig(logprobs_mode="processed_logprobs" if processed_logprobs else "raw_logprobs"),
            device=device,
            dtype=model.norm.weight.dtype,
            backend=backend or BACKENDS.get(model, "reference"),
            eos_ids=eos,
            graphs=lambda step, sampling: None if recorder is None else StepGraphs(step, sampling, recorder, seats),
            poison=True,
            **options,
        ),
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


def replace_passes(model: DecoderModel, passes: Any) -> Any:
    """Let all passes of the model's MTP layer go through `passes`. → the layer's own."""
    head: Any = model.mtp_head
    own = head.extend
    head.extend = head.step = passes
    return own
