"""From a configuration to a running engine: plans (planning.py), loads, and puts the parts together."""

from __future__ import annotations

import logging
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import cast

from mtpserve_kernels.cache import reference

from mtpserve.attention.registry import BACKENDS
from mtpserve.cache.pages import PageAllocator
from mtpserve.cache.pool import KVPool
from mtpserve.config import EngineConfig, SpecConfig
from mtpserve.core.errors import ConfigError
from mtpserve.core.protocols import AttentionBackend, Grammar, GrammarCompiler, LogitsProcessor
from mtpserve.core.sampling import GrammarSpec
from mtpserve.engine.drafters import make_drafter, reduced_head
from mtpserve.engine.engine import Engine
from mtpserve.engine.planning import backend_of, load_model, plan, positions
from mtpserve.layers.kernels import triton_kernels, use_kernels
from mtpserve.runtime.exact import ExactModel
from mtpserve.runtime.graphs import ROWS, CudaRecorder, StepGraphs, usual
from mtpserve.runtime.rules import LogitRules
from mtpserve.runtime.runner import Runner
from mtpserve.runtime.sampling import SeatSampling
from mtpserve.runtime.seats import SeatTensors
from mtpserve.runtime.step import Judge, Step
from mtpserve.spec.accept import Decide, decide
from mtpserve.spec.curves import Curve, read_curve
from mtpserve.spec.synthetic import SyntheticAcceptance
from mtpserve.spec.thresholds import Thresholds

log = logging.getLogger(__name__)

KERNELS = {"compact": "mtpserve_kernels.cache.compact", "decide": "mtpserve.spec.triton"}  # imported only where they run


def make_graphs(config: EngineConfig, step: Step, sampling: SeatSampling, running: int) -> StepGraphs | None:
    """None where steps are not captured: on a CPU, and with parts that have to read on the host."""
    wanted, safe = not config.scheduler.disable_cuda_graph, step.attention.graph_safe and step.drafter.graph_safe
    if step.seats.device.type != "cuda" or not wanted or not safe:
        return None
    most = min(config.scheduler.cuda_graph_max_bs or running, running, ROWS[-1])
    graphs = StepGraphs(step, sampling, CudaRecorder(), most)
    trees = config.spec.topk > 1 and config.spec.steps > 0
    graphs.record_all(usual(step.drafter.coupled), trees, config.spec.speculative_disable_by_batch_size)
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
            self.compiler = cast(GrammarCompiler, import_module("mtpserve.text.grammar").GrammarCompiler(*self.arguments))
        return self.compiler.compile(spec)


def warn(spec: SpecConfig, curve: Curve | None) -> None:
    """Loudly, of output that is not the model's."""
    if spec.lossy:
        log.warning("LOSSY: acceptance thresholds below 1; the output is not what the model alone would give")
    if curve is not None:
        log.warning("SYNTHETIC ACCEPTANCE: drafts are accepted by lot, to the curve %s; the output means nothing", curve.name)
        if len(curve.lengths) < spec.steps:
            log.warning("the curve %s ends at %d drafts: its last rate is taken for all behind them", curve.name, len(curve.lengths))


def build_engine(config: EngineConfig, *, progress: bool = False, poison: bool = False) -> Engine:
    """Raises LoadError and ConfigError. `poison` fills the KV pool with NaN, so that a test sees an unwritten slot read."""
    processors = load_processors(config.sampling.logits_processors)
    planned = plan(config)
    found, dtype, device, kept, memory = planned.found, planned.dtype, planned.device, planned.storage, planned.memory
    arch, spec, page_size = found.arch, config.spec, config.cache.page_size
    for what, size in [*memory.rows, ("all", memory.total)]:
        log.info("memory: %-44s %10.1f MiB", what, size / 2**20)
    model = load_model(found, dtype, device, positions(config, arch), progress, kept.keep_blocks)
    exact, backend = spec.speculative_exact, backend_of(config, device)
    kernels = {} if backend == "reference" else {name: getattr(import_module(module), name) for name, module in KERNELS.items()}
    if kernels and not exact:
        use_kernels(model, triton_kernels())
    compact = kernels.get("compact", reference.compact)
    spare = memory.pages  # the page behind those that requests get
    pool = KVPool(arch.kv, arch.kv_layers, memory.pages + 1, page_size, dtype, device, poison, compact, kept.cache)
    pool.clear(spare)
    attention = cast(AttentionBackend, BACKENDS.get(backend)(pool, arch.heads, arch.scale))
    if not attention.supports(arch.kv, device.type):
        raise ConfigError(f"--attention-backend {backend} does not support {arch.kv}; reference does")
    reduced = reduced_head(model, found.token_map, device)
    drafter = make_drafter(spec, model, attention, config.scheduler.chunked_prefill_size, reduced)
    seats = SeatTensors(memory.max_running, memory.context_length, drafter, arch.vocab, page_size, device, arch.eos_ids, spare)
    rules = LogitRules(seats, memory.max_running, arch.vocab, arch.eos_ids, processors, device)
    thresholds = Thresholds(spec.speculative_accept_threshold_single, spec.speculative_accept_threshold_acc)
    kernel: Decide | None = kernels.get("decide")
    curve = None if spec.speculative_synthetic_acceptance is None else read_curve(spec.speculative_synthetic_acceptance)
    if curve is not None:
        kernel = SyntheticAcceptance(kernel or decide, curve.rates(drafter.depth), device)
    if exact:
        attention = cast(AttentionBackend, BACKENDS.get("exact")(pool, arch.heads, arch.scale))
    judge = Judge(thresholds, config.sampling.logprobs_mode == "processed_logprobs", kernel)
    step = Step(ExactModel(model) if exact else model, attention, pool, drafter, seats, judge)
    sampling = SeatSampling(memory.max_running, rules, device)
    overlap = 1 if device.type == "cuda" and not config.scheduler.disable_overlap_schedule else 0
    runner = Runner(step, sampling, make_graphs(config, step, sampling, memory.max_running), overlapped=overlap > 0)
    warn(spec, curve)
    engine = Engine(
        runner,
        config.scheduler,
        allocator=PageAllocator(memory.pages),
        page_size=page_size,
        max_running=memory.max_running,
        context_length=memory.context_length,
        vocab=arch.vocab,
        eos_ids=arch.eos_ids,
        want=spec.steps,
        name=config.model.names[0],
        grammars=None if config.model.numbers_for_text else Grammars(config.model.tokenizer_directory, arch.vocab, arch.eos_ids),
        lossy=spec.lossy,
        overlap=overlap,
        plain_above=spec.speculative_disable_by_batch_size,
    )
    if curve is not None:
        engine.card = replace(engine.card, synthetic_acceptance=curve.name)
    log.info(
        "%s, %s on %s, %d pages of %d tokens, drafts %d deep, %d per step", arch.family, dtype, device, memory.pages, page_size, spec.steps,
        spec.nodes,
    )  # fmt: skip
    return engine
