"""From a configuration to a running engine: plans (planning.py), loads, and puts the parts together."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import cast

from mtpserve.config import EngineConfig, SpecConfig
from mtpserve.config.options import check
from mtpserve.core.errors import ConfigError
from mtpserve.core.grammars import Grammar, GrammarCompiler
from mtpserve.core.protocols import LogitsProcessor
from mtpserve.core.sampling import GrammarSpec
from mtpserve.engine.assemble import EngineOptions, EngineSizes, assemble
from mtpserve.engine.below import TierOptions
from mtpserve.engine.compute import backend_of, described, kernels_of
from mtpserve.engine.engine import Engine
from mtpserve.engine.fingerprint import facts, fingerprint
from mtpserve.engine.kv_events import KVEvents
from mtpserve.engine.planning import Plan, load_model, overlap_of, plan, positions
from mtpserve.engine.recording import header_of, recorder_of
from mtpserve.engine.spread import meet
from mtpserve.engine.threads import bind
from mtpserve.layers.decoder import Methods
from mtpserve.layers.kernels import KERNELS
from mtpserve.quant.int8 import Int8
from mtpserve.runtime.graphs import ROWS, CudaRecorder, StepGraphs, usual
from mtpserve.runtime.sampling import SeatSampling
from mtpserve.runtime.step import Step
from mtpserve.spec.curves import Curve, read_curve
from mtpserve.spec.sizes import draft_sizes

log = logging.getLogger(__name__)


def make_graphs(config: EngineConfig, step: Step, sampling: SeatSampling, running: int) -> StepGraphs | None:
    """None where steps are not captured: on a CPU, and with parts that have to read on the host."""
    wanted, safe = not config.scheduler.disable_cuda_graph, step.attention.graph_safe and step.drafter.graph_safe
    if step.seats.device.type != "cuda" or not wanted or not safe:
        return None
    if config.parallel.spreads:
        log.info("steps are not captured: what engines that share experts send each other is known only in the step")
        return None
    most = min(config.scheduler.cuda_graph_max_bs or running, running, ROWS[-1])
    graphs = StepGraphs(step, sampling, CudaRecorder(), most)
    trees = config.spec.topk > 1 and config.spec.steps > 0
    spec = config.spec
    graphs.record_all(usual(step.drafter.coupled), trees, spec.speculative_disable_by_batch_size, spec.adaptive)
    return graphs


def load_processors(named: str | None) -> list[LogitsProcessor]:
    """Raises ConfigError for what cannot be imported, or does not start without arguments."""
    made: list[LogitsProcessor] = []
    for name in (named or "").split(","):
        if not name.strip():
            continue
        module, _, kind = name.strip().partition(":")
        try:
            made.append(getattr(import_module(module), kind)())
        except Exception as error:
            raise ConfigError(f"--logits-processors {name.strip()}: {type(error).__name__}: {error}") from error
    return made


class Grammars:
    """core.protocols.GrammarCompiler, made when the first request has a grammar: most engines never see one."""

    def __init__(self, tokenizer: Path, vocab: int, eos_ids: tuple[int, ...]) -> None:
        self.arguments = tokenizer, vocab, eos_ids
        self.compiler: GrammarCompiler | None = None

    def compile(self, spec: GrammarSpec) -> Grammar:
        if self.compiler is None:
            self.compiler = cast(GrammarCompiler, import_module("mtpserve.text.grammar").LLGuidanceCompiler(*self.arguments))
        return self.compiler.compile(spec)


def recorded_in(config: EngineConfig) -> str | None:
    """Of several engines each has a file of its own."""
    file = config.scheduler.record_steps
    return file if file is None or config.parallel.data_parallel_size == 1 else f"{file}.{config.replica}"


def observer_of(config: EngineConfig) -> KVEvents | None:
    events = config.cache.kv_events
    return None if events is None else KVEvents(events.of(config.replica), config.cache.page_size, config.replica)


def below_of(config: EngineConfig, planned: Plan) -> TierOptions:
    """Pages of an engine with others behind one front end are its own."""
    nodes = config.disaggregation
    known = {} if nodes.role is None else facts(config, planned)
    return TierOptions(config.host_bytes, config.cache, nodes, known, config.replica)


def warn(spec: SpecConfig, curve: Curve | None) -> None:
    """Loudly, of output that is not the model's."""
    if spec.lossy:
        log.warning("LOSSY: acceptance thresholds below 1; the output is not what the model alone would give")
    if curve is not None:
        log.warning("SYNTHETIC ACCEPTANCE: drafts are accepted by lot, to the curve %s; the output means nothing", curve.name)
        if len(curve.lengths) < spec.steps:
            log.warning("the curve %s ends at %d drafts: its last rate is taken for all later ones", curve.name, len(curve.lengths))


def log_rounding(methods: Methods) -> None:
    """What int8 costs, as far as the weights tell: drafts stay lossless, the trunk's own text changes."""
    for what, method in (("the trunk's layers", methods.layers), ("the draft model", methods.draft)):
        if isinstance(method, Int8) and method.errors:
            median_error, largest = 100 * median(method.errors), 100 * max(method.errors)
            log.info("int8, %s: rounding changes the matrices by %.2f %%, at most %.2f %%", what, median_error, largest)


def build_engine(config: EngineConfig, *, progress: bool = False, poison: bool = False) -> Engine:
    """Raises LoadError and ConfigError. `poison` fills the KV pool with NaN, so that a test sees an unwritten slot read."""
    size = config.parallel.tensor_parallel_size
    check(size == 1, "tensor_parallel_size", size, "1: an engine has one process")
    bind(config)
    processors = load_processors(config.sampling.logits_processors)
    planned = plan(config)
    config = planned.config
    observer = observer_of(config)  # before anything is loaded: its port may be in use
    dtype, device, kept, memory = planned.dtype, planned.device, planned.storage, planned.memory
    arch, spec, page_size = planned.described.arch, config.spec, config.cache.page_size
    for what, size in [*memory.rows, ("all", memory.total)]:
        log.info("memory: %-44s %10.1f MiB", what, size / 2**20)
    kernels = KERNELS.get(kernels_of(config, device))()
    model = load_model(planned.described, dtype, device, positions(config, arch, device), kernels, progress, kept)
    log_rounding(model.methods)
    curve = None if spec.speculative_synthetic_acceptance is None else read_curve(spec.speculative_synthetic_acceptance)
    warn(spec, curve)
    running, record = memory.max_running, recorded_in(config)
    engine = assemble(
        model,
        EngineSizes(pages=memory.pages, page_size=page_size, seats=running, context=memory.context_length, states=memory.states),
        EngineOptions(
            spec=spec,
            scheduler=config.scheduler,
            sampling=config.sampling,
            device=device,
            dtype=dtype,
            stored=kept.cache,
            backend=backend_of(config, device),
            eos_ids=arch.eos_ids,
            token_map=planned.described.token_map,
            rates=None if curve is None else curve.rates(draft_sizes(spec, config.scheduler.chunked_prefill_size).depth),
            processors=processors,
            grammars=None if config.model.numbers_for_text else Grammars(config.model.tokenizer_directory, arch.vocab, arch.eos_ids),
            overlap=overlap_of(config, device),
            recorder=None if record is None else partial(recorder_of, record, header_of(config, planned)),
            graphs=lambda step, sampling: make_graphs(config, step, sampling, running),
            fingerprint=None if config.cache.disable_radix_cache else fingerprint(config, planned),
            below=below_of(config, planned),
            observer=observer,
            floor=None if config.model.load_format == "dummy" or config.disaggregation.role == "prefill" else planned.described.floor,
            poison=poison,
            name=config.model.names[0],
            kernels=described(config, device),
        ),
    )
    engine.ticks, family = meet(config, planned.described.spread, arch, dtype, device), planned.described.family
    engine.card = replace(
        engine.card,
        synthetic_acceptance=None if curve is None else curve.name,
        tool_call_parser=family.tool_call_parser,
        reasoning_parser=family.reasoning_parser,
        algorithm=None if spec.speculative_algorithm is None else spec.speculative_algorithm.upper(),
    )
    log.info(
        "%s, %s on %s, kernels: %s, %s pages of %d tokens, drafts %d deep, %d per step", arch.family, dtype, device, engine.card.kernels,
        memory.counted, page_size, spec.steps, spec.nodes,
    )  # fmt: skip
    return engine
