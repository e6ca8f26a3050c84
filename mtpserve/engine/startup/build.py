"""The way from a configuration to a running engine: plans (planning.py), loads, and puts the parts
together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence as Seq
from dataclasses import replace
from functools import partial
from importlib import import_module
from statistics import median

from mtpserve.config import EngineConfig, SpecConfig
from mtpserve.core.errors import ConfigError
from mtpserve.core.protocols.logits_processor import LogitsProcessor
from mtpserve.core.protocols.parallel import Ranks
from mtpserve.engine.engine import Engine
from mtpserve.engine.grammars import LazyGrammars, PreparedGrammars
from mtpserve.engine.pages.kv_events import KVEvents
from mtpserve.engine.pages.kv_offload import TierOptions
from mtpserve.engine.parallel.rank_messages import Order, Reached, Room, SharedFiles, Wire
from mtpserve.engine.parallel.ranks import RankProcesses, joined
from mtpserve.engine.parallel.spread import meet, ticks_of
from mtpserve.engine.process.controls import Controls
from mtpserve.engine.startup.assemble import EngineOptions, EngineSizes, assemble, computing, kv_tensors
from mtpserve.engine.startup.compute import backend_of, described, kernels_of
from mtpserve.engine.startup.drafter import as_chosen as as_chosen, plan_engine
from mtpserve.engine.startup.fingerprint import facts, fingerprint
from mtpserve.engine.startup.planning import (
    Plan,
    load_model,
    overlap_of,
    positions,
)
from mtpserve.engine.startup.recording import header_of, recorder_of
from mtpserve.engine.startup.serving.changes import adapters_of, rank_weights, take_changes
from mtpserve.engine.startup.threads import bind, core_share
from mtpserve.engine.updates.adapter_updates import take_adapters
from mtpserve.engine.updates.rank_memory import RankMemory
from mtpserve.layers.decoder import DecoderModel, Methods
from mtpserve.layers.kernels import KERNELS
from mtpserve.quant.int8 import Int8
from mtpserve.runtime.graphs.capture import CudaGraphCapturer
from mtpserve.runtime.graphs.graph_key import ROWS
from mtpserve.runtime.graphs.graphs import StepGraphs
from mtpserve.runtime.memory import MemoryPlan, require_memory
from mtpserve.runtime.parallel.routed import RoutingRecord, routing_record
from mtpserve.runtime.runner import Runner
from mtpserve.runtime.sampling.sampling import SamplingState, usual_features
from mtpserve.runtime.step import Step
from mtpserve.spec.curves import Curve, read_curve
from mtpserve.spec.sizes import spec_sizes

log = logging.getLogger(__name__)


def make_graphs(config: EngineConfig, step: Step, sampling: SamplingState, running: int) -> StepGraphs | None:
    """Captures the steps; None if steps are not captured: on a CPU, and with parts that have to read on the
    host."""
    is_enabled, safe = (
        not config.scheduler.disable_cuda_graph,
        step.attention.graph_safe and step.drafter.graph_safe,
    )
    if step.req_tensors.device.type != "cuda" or not is_enabled or not safe:
        return None
    if config.parallel.spreads:
        log.info(
            "CUDA graphs are off: with expert parallelism the sizes of messages between engines are "
            "known only during a step"
        )
        return None
    max_batch_size = min(config.scheduler.cuda_graph_max_bs or running, running, ROWS[-1])
    graphs = StepGraphs(step, sampling, CudaGraphCapturer(), max_batch_size)
    trees = config.spec.topk > 1 and config.spec.steps > 0
    spec, budget, shared = config.spec, config.scheduler.step_tokens, not config.cache.disable_radix_cache
    usual = usual_features(step.drafter.coupled)
    with_adapters = [replace(features, adapters=True) for features in usual if config.lora.is_enabled]
    graphs.capture_all(
        usual + with_adapters,
        trees,
        spec.speculative_disable_by_batch_size,
        spec.adaptive,
        budget,
        shared,
    )
    return graphs


def load_processors(named: str | None) -> list[LogitsProcessor]:
    """Raises ConfigError for what cannot be imported, or does not start without arguments."""
    processors: list[LogitsProcessor] = []
    for name in (named or "").split(","):
        if not name.strip():
            continue
        module, _, kind = name.strip().partition(":")
        try:
            processors.append(getattr(import_module(module), kind)())
        except Exception as error:
            raise ConfigError(
                f"--logits-processors {name.strip()}: {type(error).__name__}: {error}"
            ) from error
    return processors


def recorded_in(config: EngineConfig) -> str | None:
    """Returns the file of --record-steps; each of several engines has its own. None: nothing is recorded."""
    file = config.scheduler.record_steps
    return file if file is None or config.parallel.data_parallel_size == 1 else f"{file}.{config.replica}"


def observer_of(config: EngineConfig) -> KVEvents | None:
    events = config.cache.kv_events
    return (
        None
        if events is None
        else KVEvents(events.of(config.replica), config.cache.page_size, config.replica)
    )


def below_of(config: EngineConfig, engine_plan: Plan, file: int | None) -> TierOptions:
    """Pages of an engine with others behind one front end are its own. `file`: of the host memory that an
    engine's ranks share."""
    nodes = config.disaggregation
    node_facts = {} if nodes.role is None else facts(config, engine_plan)
    return TierOptions(
        config.host_bytes,
        config.cache,
        nodes,
        node_facts,
        config.replica,
        config.rank,
        config.parallel.ranks,
        file,
    )


def warn(spec: SpecConfig, curve: Curve | None) -> None:
    """Warns of output that is not the model's."""
    if spec.lossy:
        log.warning("LOSSY: an acceptance threshold is below 1; the output distribution is not the model's")
    if curve is not None:
        log.warning(
            "SYNTHETIC ACCEPTANCE: drafts are accepted at random by the curve %s; the output is meaningless",
            curve.name,
        )
        if len(curve.lengths) < spec.steps:
            log.warning(
                "the curve %s ends at %d drafts: its last rate is used for later drafts",
                curve.name,
                len(curve.lengths),
            )


def log_plan(engine_plan: Plan, computed: str) -> None:
    """What the engine is about to load, in three lines; of several engines, which are alike, the first says
    it."""
    config, memory = engine_plan.config, engine_plan.memory
    for what, size in [*memory.rows, ("all", memory.total)]:
        log.debug("memory: %-52s %10.1f MiB", what, size / 2**20)
    log.debug("KV cache: %s pages of %d tokens", memory.counted, config.cache.page_size)
    level = logging.INFO if config.replica == 0 else logging.DEBUG
    log.log(
        level,
        "device: %s, %s, kernels: %s; weights: %.2f GiB",
        engine_plan.device,
        str(engine_plan.dtype).removeprefix("torch."),
        computed,
        size_of(memory, "weights") / 2**30,
    )
    log.log(
        level,
        "KV cache: %.2f GiB for %s tokens; at most %d requests at once, at most %s tokens in one of them",
        size_of(memory, "KV") / 2**30,
        f"{max(memory.pages) * config.cache.page_size:,}",
        memory.max_running,
        f"{memory.context_length:,}",
    )
    log.log(logging.WARNING if engine_plan.left_out else level, "drafter: %s", engine_plan.drafting)


def format_of(engine_plan: Plan) -> str:
    """How the trunk's matrices are stored, in a word."""
    storage, dtype = engine_plan.storage, str(engine_plan.dtype).removeprefix("torch.")
    return "int8" if storage.int8 else "+".join(sorted(storage.kinds)) or dtype


def size_of(memory: MemoryPlan, what: str) -> int:
    """Bytes of the rows whose names begin with `what`."""
    return sum(size for name, size in memory.rows if name.startswith(what))


def log_rounding(methods: Methods) -> None:
    """What int8 costs, as far as the weights tell: drafts stay lossless, the trunk's own text changes."""
    for what, method in (("the target model's layers", methods.layers), ("the draft model", methods.draft)):
        if isinstance(method, Int8) and method.errors:
            median_error, largest = 100 * median(method.errors), 100 * max(method.errors)
            log.info(
                "int8, %s: rounding error of the matrices: %.2f %% (median), %.2f %% (maximum)",
                what,
                median_error,
                largest,
            )


def load_part(engine_plan: Plan, ranks: Ranks, progress: bool, routing: RoutingRecord | None) -> DecoderModel:
    """The model, or this rank's part of it."""
    config, device = engine_plan.config, engine_plan.device
    kernels = replace(KERNELS.get(kernels_of(config, device))(), ranks=ranks, routing=routing)
    length = positions(config, engine_plan.described.arch, device)
    return load_model(
        engine_plan.described, engine_plan.dtype, device, length, kernels, progress, engine_plan.storage
    )


def sizes_of(engine_plan: Plan) -> EngineSizes:
    memory, page_size = engine_plan.memory, engine_plan.config.cache.page_size
    return EngineSizes(
        pages=memory.pages,
        page_size=page_size,
        max_num_reqs=memory.max_running,
        context=memory.context_length,
        states=memory.states,
    )


def options_of(engine_plan: Plan, processors: Seq[LogitsProcessor], curve: Curve | None) -> EngineOptions:
    """Returns the options of what computes, alike in all ranks."""
    config, device, arch = engine_plan.config, engine_plan.device, engine_plan.described.arch
    running, budget = engine_plan.memory.max_running, config.scheduler.step_tokens
    return EngineOptions(
        spec=config.spec,
        scheduler=config.scheduler,
        sampling=config.sampling,
        device=device,
        dtype=engine_plan.dtype,
        kv_dtype=engine_plan.storage.cache,
        backend=backend_of(config, device),
        eos_ids=arch.eos_ids,
        token_map=engine_plan.described.token_map,
        rates=None if curve is None else curve.rates(spec_sizes(config.spec, budget).depth),
        processors=processors,
        grammars=None
        if config.model.numbers_for_text
        else LazyGrammars(config.model.tokenizer_directory, arch.vocab, arch.eos_ids),
        overlap=overlap_of(config, device),
        graphs=lambda step, sampling: make_graphs(config, step, sampling, running),
    )


def curve_of(spec: SpecConfig) -> Curve | None:
    return (
        None
        if spec.speculative_synthetic_acceptance is None
        else read_curve(spec.speculative_synthetic_acceptance)
    )


def room_of(memory: MemoryPlan) -> Room:
    return Room(list(memory.pages), memory.states, memory.max_running, memory.context_length)


def in_room(engine_plan: Plan, room: Room) -> Plan:
    fitting = replace(
        engine_plan.memory,
        pages=tuple(room.pages),
        states=room.states,
        max_running=room.max_running,
        context_length=room.context_length,
    )
    return replace(engine_plan, memory=fitting)


def build_rank(
    config: EngineConfig, wire: Wire[Order], files: SharedFiles
) -> tuple[Runner, PreparedGrammars | None, Callable[[], None], Controls] | None:
    """Builds the runner in a process of rank 1 and up. Returns it with its grammars, the end of a tick and
    what it does with calls; None if rank 0 has given up. Raises LoadError, ConfigError and EngineDead."""
    bind(config)
    processors, engine_plan = load_processors(config.sampling.logits_processors), plan_engine(config)
    wire.send(room_of(engine_plan.memory))
    room = wire.receive()
    if room is None:
        return None
    assert isinstance(room, Room)
    engine_plan = in_room(engine_plan, room)
    ranks = joined(config, engine_plan.device, files.sums, room.port)
    routing = routing_record(config.sampling, engine_plan.described.arch)
    model = load_part(engine_plan, ranks, False, routing)
    wire.send(Reached("loaded"))
    options = replace(
        options_of(engine_plan, processors, curve_of(config.spec)),
        routing=routing,
        below=below_of(config, engine_plan, files.pages),
        adapters=adapters_of(engine_plan, model, ranks),
    )
    parts, spread = computing(model, sizes_of(engine_plan), options), engine_plan.described.spread
    controls = Controls()
    rank_weights(controls, engine_plan, model)
    RankMemory(controls, parts.runner, model, kv_tensors(parts.runner))
    if options.adapters is not None:
        take_adapters(controls, options.adapters)
    if spread is None:
        return parts.runner, parts.grammars, lambda: None, controls
    meet(config, spread, engine_plan.described.arch, engine_plan.dtype, engine_plan.device)
    return parts.runner, parts.grammars, spread.finish, controls


def build_engine(config: EngineConfig, *, progress: bool = False, poison: bool = False) -> Engine:
    """Raises LoadError and ConfigError. `poison` fills the KV pool with NaN, so that a test sees an unwritten
    slot read."""
    others = RankProcesses(config)  # before this one is bound to its part of the cores
    try:
        bind(config)
        return build_with(others, config, progress, poison)
    except BaseException:
        others.close()
        raise


def build_with(others: RankProcesses, config: EngineConfig, progress: bool, poison: bool) -> Engine:
    processors, engine_plan = load_processors(config.sampling.logits_processors), plan_engine(config)
    observer = observer_of(config)  # before anything is loaded: its port may be in use
    require_memory(engine_plan.memory, engine_plan.config, engine_plan.device)
    room = others.agree(room_of(engine_plan.memory))
    engine_plan, together = in_room(engine_plan, room), others.connect(room, engine_plan.device)
    config, device, memory = engine_plan.config, engine_plan.device, engine_plan.memory
    computed = f"{described(config, device)}{together}"
    log_plan(engine_plan, computed)
    routing = routing_record(config.sampling, engine_plan.described.arch)
    model = load_part(engine_plan, others.ranks, progress, routing)
    others.reach("loaded")
    log_rounding(model.methods)
    curve, spec, arch = curve_of(config.spec), config.spec, engine_plan.described.arch
    warn(spec, curve)
    record = recorded_in(config)
    options = replace(
        options_of(engine_plan, processors, curve),
        routing=routing,
        recorder=None if record is None else partial(recorder_of, record, header_of(config, engine_plan)),
        others=others if others.size > 1 else None,
        fingerprint=None if config.cache.disable_radix_cache else fingerprint(config, engine_plan),
        below=below_of(config, engine_plan, others.files.pages),
        observer=observer,
        adapters=adapters_of(engine_plan, model, others.ranks),
        floor=None
        if config.model.load_format == "dummy" or config.disaggregation.role == "prefill"
        else engine_plan.described.floor,
        poison=poison,
        name=config.model.names[0],
        kernels=computed,
    )
    engine = assemble(model, sizes_of(engine_plan), options)
    others.reach("ready")
    family, spread = engine_plan.described.family, engine_plan.described.spread
    if spread is not None:
        engine.ticks = ticks_of(spread, meet(config, spread, arch, engine_plan.dtype, device), others)
    engine.cores = core_share(config)
    take_changes(engine, engine_plan, model, options)
    engine.card = replace(
        engine.card,
        synthetic_acceptance=None if curve is None else curve.name,
        wanted_context=memory.context_length,
        tool_call_parser=family.tool_call_parser,
        reasoning_parser=family.reasoning_parser,
        algorithm=(spec.speculative_algorithm or "").upper() if spec.parts else None,
        drafting=engine_plan.drafting,
        checkpoint=config.model.model,
        device=device.type,
        weight_format=format_of(engine_plan),
        experts=None if routing is None else routing.sizes,
    )
    if engine.context_length < memory.context_length and config.replica == 0:
        log.warning(
            "a request may have only %d tokens, not the model's context of %d: the KV cache is too "
            "small; raise --max-total-tokens or --mem-fraction-static",
            engine.context_length, memory.context_length,
        )  # fmt: skip
    log.debug("%s: %d drafts in a row, %d per step", arch.family, spec.steps, spec.nodes)
    return engine
