"""Puts the parts of an engine together, in one place: `build` calls it with a loaded checkpoint, tests with
models of their own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from typing import Any

import torch
from mtpserve_kernels.cache import reference
from mtpserve_kernels.recurrent.reference import recur as reference_recur
from mtpserve_kernels.requests.reference import draft_positions
from torch import Tensor

from mtpserve.attention.recurrent import MixedLayers, Recur, Recurrence
from mtpserve.attention.registry import BACKENDS
from mtpserve.cache.boundary import BoundaryRows, StoreBoundary
from mtpserve.cache.deferred import DeferredRows, Keep
from mtpserve.cache.groups import PageGroups
from mtpserve.cache.states import States
from mtpserve.cache.stores import Stores
from mtpserve.config import SamplingConfig, SchedulerConfig, SpecConfig
from mtpserve.config.drafters import source_name
from mtpserve.core.arch.model import (
    Features,
    LayerKind,
    ModelArch,
    attending,
    page_groups,
    recurrent_kinds,
)
from mtpserve.core.errors import ConfigError
from mtpserve.core.protocols.attention import AttentionBackend
from mtpserve.core.protocols.grammars import GrammarCompiler
from mtpserve.core.protocols.logits_processor import LogitsProcessor
from mtpserve.core.protocols.models import DraftModel, Trunk
from mtpserve.core.protocols.observers import CacheObserver
from mtpserve.core.protocols.runner import ModelRunner
from mtpserve.core.spec_sizes import SpecSizes
from mtpserve.engine.depth.watchdog import Watchdog
from mtpserve.engine.engine import Engine
from mtpserve.engine.grammars import PreparedGrammars
from mtpserve.engine.pages.kv_connector import KVConnector
from mtpserve.engine.pages.kv_offload import TierOptions, make_tiers, page_parts
from mtpserve.engine.parallel.ranks import EveryRank, RankProcesses
from mtpserve.engine.startup.compute import recur_of
from mtpserve.engine.startup.drafter import check_layers
from mtpserve.runtime.device_requests import DeviceRequests, RequestKernels
from mtpserve.runtime.exact import ExactModel
from mtpserve.runtime.graphs.graphs import StepGraphs
from mtpserve.runtime.lora.device_adapters import DeviceAdapters
from mtpserve.runtime.parallel.routed import RoutingRecord, routed_experts
from mtpserve.runtime.runner import Runner
from mtpserve.runtime.sampling.rules import LogitRules
from mtpserve.runtime.sampling.sampling import SamplingState
from mtpserve.runtime.step import Step
from mtpserve.spec.build import DraftersByShape, make_draft_model, make_drafter, reduced_head
from mtpserve.spec.draft.frozen import passes_of
from mtpserve.spec.draft.history import FeatureHistory
from mtpserve.spec.draft.passes import DraftPasses
from mtpserve.spec.draft.propose import propose
from mtpserve.spec.sizes import spec_sizes
from mtpserve.spec.verify.accept import Verify, verify
from mtpserve.spec.verify.synthetic import SyntheticAcceptance
from mtpserve.spec.verify.thresholds import Thresholds

log = logging.getLogger(__name__)

# On a CPU a step takes as long as it has rows: a long prompt gets some. On a GPU few take as long.
CPU_LONG = 8

# kernels of each backend, imported only where they run
KERNELS: dict[str, dict[str, str]] = {
    "triton": {
        "compact": "mtpserve_kernels.cache.compact",
        "slots": "mtpserve_kernels.cache.slots",
        "store_boundary": "mtpserve_kernels.cache.slots",
        "place": "mtpserve_kernels.requests.step",
        "following": "mtpserve_kernels.requests.step",
        "draft_positions": "mtpserve_kernels.requests.step",
        "advance": "mtpserve_kernels.requests.step",
        "hold": "mtpserve_kernels.requests.step",
        "result_table": "mtpserve_kernels.requests.step",
        "verify": "mtpserve.spec.triton",
        "propose": "mtpserve.spec.triton",
    },
    "cpu": {
        "compact": "mtpserve_kernels.cpu.cache",
        "store_boundary": "mtpserve_kernels.cpu.cache",
        "keep": "mtpserve_kernels.cpu.cache",
        "slots": "mtpserve_kernels.cpu.requests",
        "place": "mtpserve_kernels.cpu.requests",
        "following": "mtpserve_kernels.cpu.requests",
        "advance": "mtpserve_kernels.cpu.requests",
        "hold": "mtpserve_kernels.cpu.requests",
        "verify": "mtpserve.spec.cpu",
        "propose": "mtpserve.spec.cpu",
        "draft_chain": "mtpserve.spec.cpu",
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSizes:
    # pages for requests in each group (core.arch.model.page_groups); one more in each pads batches
    pages: Seq[int]
    page_size: int  # tokens in a page
    max_num_reqs: int  # requests that run at once
    context: int  # tokens of prompt and output together
    states: int = 0  # states of recurrent layers that are kept for requests with the same prefix


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What is not the model's. Everything has the value that a plain engine on a CPU has."""

    spec: SpecConfig = field(default_factory=SpecConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype = torch.float32  # what the layers compute in
    kv_dtype: torch.dtype | None = None  # what keys and values are stored in; None: `dtype`
    # the backend of attention, see attention/registry; the kernels of KERNELS move and verify, too
    backend: str = "reference"
    eos_ids: tuple[int, ...] = ()
    token_map: list[int] | None = None  # the tokens that drafting looks at; None: all
    rates: Seq[float] | None = None  # synthetic acceptance, of each depth
    processors: Seq[LogitsProcessor] = ()
    grammars: GrammarCompiler | None = None
    recorder: Callable[[ModelRunner], ModelRunner] | None = None  # between engine and runner
    others: RankProcesses | None = None  # that compute the same model; None: there are none
    overlap: int = 0  # steps in flight while another is planned
    graphs: Callable[[Step, SamplingState], StepGraphs | None] = lambda step, sampling: None
    fingerprint: bytes | None = b""  # all that KV depends on besides tokens; None: no prefix cache
    below: TierOptions = field(default_factory=TierOptions)  # the device
    observer: CacheObserver | None = None
    # share of first drafts that the draft model has accepted at least, see engine/depth/watchdog; None:
    # nobody watches
    floor: float | None = None
    adapters: DeviceAdapters | None = None  # of the model's layers
    poison: bool = False  # fill the KV pool with NaN, so that a test sees a slot read that was not written
    routing: RoutingRecord | None = None  # the trunk's; None: which experts it chooses is not kept
    name: str = ""
    kernels: str = ""  # for people


def sizes_of(options: EngineOptions, layers: Seq[LayerKind], features: Features) -> SpecSizes:
    """`features`: of the draft model."""
    sizes = spec_sizes(options.spec, options.scheduler.step_tokens)
    # The pages of a window are gone before a deferred row is stored in them. Of chained modules each row
    # needs those before it at once.
    return (
        sizes
        if page_groups(layers) == (None,) and not features.chained
        else replace(sizes, max_deferred_tokens=0)
    )


def make_states(
    arch: ModelArch, sizes: EngineSizes, drafts: SpecSizes, options: EngineOptions
) -> States | None:
    """Returns the states of recurrent layers; None: the model has no recurrent layers."""
    kinds = recurrent_kinds(arch.layers)
    seats = sizes.max_num_reqs + 1
    return (
        States(kinds, seats, drafts.nodes, sizes.states, options.dtype, options.device, options.poison)
        if kinds
        else None
    )


def trunk_attention(
    name: str, arch: ModelArch, stores: Stores, states: States | None, recur: Recur
) -> AttentionBackend:
    """The backend of this name for the trunk's layers. `stores`: of all that attend; `states`: of those that
    keep one."""
    kinds = arch.layers[: arch.num_layers]
    count = len(attending(kinds))
    attention = BACKENDS.get(name)(stores.select_layers(slice(count)), arch.heads, arch.scale)
    if count == len(kinds):
        return attention
    return MixedLayers(kinds, attention, None if states is None else Recurrence(states, recur))


def draft_passes(
    model: Trunk, draft_model: DraftModel, stores: Stores, sizes: EngineSizes, drafts: SpecSizes,
    options: EngineOptions,
    kernels: Mapping[str, Any],
) -> DraftPasses:  # fmt: skip
    """`stores`: of all layers, the draft model's own after the trunk's. `kernels`: the backend's, by their
    names in KERNELS."""
    arch, width = (
        model.arch,
        draft_model.features.boundary_width(model.arch.hidden, model.arch.residual // model.arch.hidden),
    )
    boundary = deferred = history = None
    if width:
        store_boundary: StoreBoundary = kernels.get("store_boundary", reference.store_boundary)
        boundary = BoundaryRows(
            sizes.pages[0] + 1, sizes.page_size, width, options.dtype, options.device, store_boundary
        )
    if (rows := draft_model.features.rows) > 1:
        history = FeatureHistory(sizes.max_num_reqs + 1, rows, width // rows, options.dtype, options.device)
    if width and drafts.max_deferred_tokens:
        keep: Keep = kernels.get("keep", reference.keep)
        deferred = DeferredRows(
            sizes.max_num_reqs + 1, drafts.max_deferred_tokens, width, options.dtype, options.device, keep
        )
    draft_stores = stores.select_layers(slice(len(attending(arch.layers[: arch.num_layers])), None))
    scale = arch.scale if arch.draft is None else arch.draft.scale
    attention = BACKENDS.get(options.backend)(draft_stores, arch.heads, scale)
    reduced = reduced_head(model, draft_model, options.token_map)
    positions = partial(kernels.get("draft_positions", draft_positions), page_size=sizes.page_size)
    return passes_of(draft_model)(
        draft_model, attention, positions, boundary, reduced, kernels.get("propose", propose), deferred,
        history, drafts.steps,
        kernels.get("draft_chain"),
    )  # fmt: skip


def make_seats(
    sizes: EngineSizes, drafts: SpecSizes, vocab: int, options: EngineOptions, coupled: bool,
    kernels: Mapping[str, Any]
) -> DeviceRequests:  # fmt: skip
    request_kernels = RequestKernels(
        **{name: kernels[name] for name in RequestKernels._fields if name in kernels}
    )
    return DeviceRequests(
        sizes.max_num_reqs, sizes.context, drafts, vocab, sizes.page_size, options.device, options.eos_ids,
        sizes.pages, coupled, options.overlap,
        request_kernels,
    )  # fmt: skip


def verify_kernel(options: EngineOptions, kernels: Mapping[str, Any]) -> Verify | None:
    """Returns the kernel that verifies drafts; None: plain torch."""
    kernel: Verify | None = kernels.get("verify")
    return (
        kernel
        if options.rates is None
        else SyntheticAcceptance(kernel or verify, options.rates, options.device)
    )


def watch_of(options: EngineOptions, vocab: int) -> Watchdog | None:
    """Returns the watchdog of a draft model, or None."""
    spec = options.spec
    if options.floor is None or options.rates:
        return None
    return Watchdog(spec.steps, vocab, options.floor, source_name(spec.drafter, spec.checkpoint))


@dataclass(frozen=True, slots=True)
class Computing:
    """What computes steps, and what an engine has to know of it."""

    runner: Runner
    grammars: PreparedGrammars | None
    pages: PageGroups
    kv_connector: KVConnector | None
    drafts: bool  # by a model
    finds: bool  # prefixes: they are of no use without the state after them


def computing(model: Trunk, sizes: EngineSizes, options: EngineOptions) -> Computing:
    """`model` is loaded and on `options.device`. Raises ConfigError for what does not fit together."""
    arch, spec, device = model.arch, options.spec, options.device
    kernels = {
        name: getattr(import_module(module), name)
        for name, module in KERNELS.get(options.backend, {}).items()
    }
    draft_model = make_draft_model(spec, model)
    layers = (*arch.layers[: arch.num_layers], *(() if draft_model is None else draft_model.layers))
    drafts = sizes_of(options, layers, Features() if draft_model is None else draft_model.features)
    stores = Stores(
        attending(layers), [count + 1 for count in sizes.pages], sizes.page_size, options.dtype, device,
        options.poison,
        kernels.get("compact", reference.compact), options.kv_dtype, (sizes.max_num_reqs + 1, drafts.nodes),
        None if options.routing is None else options.routing.shape,
    )  # fmt: skip
    stores.clear_last()
    states, recur = make_states(arch, sizes, drafts, options), recur_of(options.backend)
    attention = trunk_attention(options.backend, arch, stores, states, recur)
    check_layers(layers, attention, options.backend, drafts)
    passes = (
        None
        if draft_model is None
        else draft_passes(model, draft_model, stores, sizes, drafts, options, kernels)
    )
    drafter = make_drafter(spec, drafts, passes)
    req_tensors = make_seats(sizes, drafts, arch.vocab, options, drafter.coupled, kernels)
    req_tensors.adapters = options.adapters
    exact = spec.speculative_exact and not attention.exact
    if exact and options.adapters is not None:
        raise ConfigError("--speculative-exact must be left out with --enable-lora, except in C++")
    step = Step(
        ExactModel(model) if exact else model,
        trunk_attention("exact", arch, stores, states, reference_recur) if exact else attention,
        stores,
        drafter,
        req_tensors,
        states=states,
        thresholds=Thresholds(
            spec.speculative_accept_threshold_single, spec.speculative_accept_threshold_acc
        ),
        processed_logprobs=options.sampling.logprobs_mode == "processed_logprobs",
        verify=verify_kernel(options, kernels),
        routed=routed_experts(options.routing, stores.routed, req_tensors),
    )
    seats, rows = sizes.max_num_reqs, drafts.rows_per_step
    rules = LogitRules(req_tensors, seats, arch.vocab, options.eos_ids, options.processors, device, rows)
    sampling = SamplingState(seats, rules, device)
    grammars = None if options.grammars is None else prepared(options.grammars, options.others)
    pages = PageGroups(
        page_groups(layers), sizes.pages, sizes.page_size, options.scheduler.step_tokens, sizes.states or None
    )
    parts = page_parts(stores, states, None if passes is None else passes.boundary, pages)
    kv_connector, transfers = make_tiers(options.below, parts, pages, options.fingerprint, options.recorder)
    drafters = DraftersByShape(spec, options.scheduler.step_tokens, passes, drafts)
    graphs = options.graphs(step, sampling)
    runner = Runner(step, sampling, graphs, options.overlap > 0, grammars, transfers, drafters)
    return Computing(
        runner, grammars, pages, kv_connector, passes is not None, states is None or sizes.states > 0
    )


def prepared(grammars: GrammarCompiler, others: RankProcesses | None) -> PreparedGrammars:
    return PreparedGrammars(grammars) if others is None else PreparedGrammars(grammars, others.prepare)


def runner_of(base: Runner, options: EngineOptions) -> ModelRunner:
    """What the engine is given."""
    runner: ModelRunner = base if options.others is None else EveryRank(base, options.others)
    return runner if options.recorder is None else options.recorder(runner)


def assemble(model: Trunk, sizes: EngineSizes, options: EngineOptions) -> Engine:
    """`model` is loaded and on `options.device`. Raises ConfigError for what does not fit together."""
    parts, spec = computing(model, sizes, options), options.spec
    return Engine(
        runner_of(parts.runner, options),
        options.scheduler,
        pages=parts.pages,
        kv_connector=parts.kv_connector,
        max_running=sizes.max_num_reqs,
        context_length=sizes.context,
        vocab=model.arch.vocab,
        eos_ids=options.eos_ids,
        draft_depth=0 if options.below.computes_prompts else spec.steps,
        name=options.name,
        kernels=options.kernels,
        grammars=parts.grammars,
        lossy=spec.lossy,
        overlap=options.overlap,
        plain_above=spec.speculative_disable_by_batch_size,
        adaptive=spec.adaptive,
        fingerprint=options.fingerprint if parts.finds else None,
        observer=options.observer,
        watch=watch_of(options, model.arch.vocab) if parts.drafts else None,
        drafter=source_name(spec.drafter, spec.checkpoint),
        captured=() if parts.runner.graphs is None else parts.runner.graphs.used_depths,
        apart=parts.runner.graphs is not None and not parts.runner.graphs.has_mixed_steps,
        long_rows=options.scheduler.step_tokens // CPU_LONG if options.device.type == "cpu" else None,
    )


def kv_tensors(runner: Runner) -> list[Tensor]:
    """All that a rank keeps of tokens: pages, states of recurrent layers, the draft model's rows of pages."""
    step, drafters = runner.step, runner.drafters
    boundary = None if drafters is None else drafters.boundary
    states = [] if step.states is None else step.states.tensors
    return [*step.stores.tensors, *states, *([] if boundary is None else [boundary.rows])]
