"""Weights and adapters, as far as they change while an engine serves: made from a plan and the loaded
model."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from mtpserve.config import EngineConfig
from mtpserve.core.errors import ConfigError, InvalidRequest
from mtpserve.core.protocols.control import StageCheckpoint
from mtpserve.core.protocols.parallel import ALONE, PlannedRank, Ranks
from mtpserve.core.protocols.runner import ModelRunner
from mtpserve.engine.engine import Engine
from mtpserve.engine.parallel.ranks import EveryRank
from mtpserve.engine.process.controls import Controls
from mtpserve.engine.startup.assemble import EngineOptions, kv_tensors
from mtpserve.engine.startup.planning import (
    NAME_PREFIXES,
    Plan,
    build_model,
    empty_model,
    open_as,
    positions,
    sources,
)
from mtpserve.engine.startup.recording import StepRecorder
from mtpserve.engine.updates.adapter_updates import AdapterUpdates
from mtpserve.engine.updates.pauses import Pauses
from mtpserve.engine.updates.rank_memory import RankMemory
from mtpserve.engine.updates.rank_weights import RankWeights
from mtpserve.engine.updates.sleeps import Sleeps
from mtpserve.engine.updates.weight_updates import WeightUpdates
from mtpserve.layers.decoder import DecoderModel
from mtpserve.layers.devices.lora import has_adapters
from mtpserve.runtime.lora.device_adapters import DeviceAdapters
from mtpserve.runtime.runner import Runner
from mtpserve.weights.shards import shards_of
from mtpserve.weights.update import ServingWeights


def adapters_of(engine_plan: Plan, model: DecoderModel, ranks: Ranks) -> DeviceAdapters | None:
    """The adapters of this rank's part of the model; None: it has none. Raises ConfigError."""
    whole_plan, (rank, size) = engine_plan.described, (ranks.rank, ranks.size)
    if whole_plan.lora is None:
        return None
    if not has_adapters(model):
        family = whole_plan.arch.family
        raise ConfigError(f"--enable-lora: no layer of this model ({family}) takes adapters: leave it out")
    plain = replace(engine_plan.storage, keep_blocks=False, keep_int4=False)
    whole, part = (
        empty_model(whole_plan, engine_plan.dtype, 1, plain, one) for one in (ALONE, PlannedRank(rank, size))
    )
    shards, rules = shards_of(whole, part, ranks), sources(whole_plan)[0].rules
    return DeviceAdapters(model, whole, shards, rules, engine_plan.device, engine_plan.memory.max_running)


def rank_weights(controls: Controls, engine_plan: Plan, model: DecoderModel) -> RankWeights:
    """Returns what may change the weights of a rank's part of the model."""
    described, dtype, storage = engine_plan.described, engine_plan.dtype, engine_plan.storage
    length = positions(engine_plan.config, described.arch, engine_plan.device)

    def make() -> ServingWeights:
        if described.dummy or described.spread is not None:
            option = "--load-format dummy" if described.dummy else "--enable-expert-parallel"
            raise InvalidRequest(f"weights cannot be updated with {option}")
        with torch.device("meta"):
            blueprint = build_model(described, dtype, length, model.kernels, storage)
        whole = empty_model(described, dtype, length, replace(storage, keep_blocks=False, keep_int4=False))
        kernels = model.kernels
        return ServingWeights(
            model,
            blueprint,
            whole,
            sources(described),
            prefixes=NAME_PREFIXES[: len(described.checkpoints)],
            ranks=kernels.ranks,
            packs_in_place=kernels.packs_in_place,
        )

    config = engine_plan.config
    number = config.replica * config.parallel.ranks + config.rank
    return RankWeights(controls, make, partial(open_as, described), engine_plan.device, number)


def take_changes(engine: Engine, engine_plan: Plan, model: DecoderModel, options: EngineOptions) -> None:
    """The engine and its other ranks take the calls that change weights and adapters. Loads the adapters of
    the start. Raises ConfigError."""
    others, config = options.others, engine_plan.config
    weights = rank_weights(engine.controls, engine_plan, model)
    on_every_rank = None if others is None else partial(others.control, take=engine.controls.take)
    updates = WeightUpdates(engine, weights, on_every_rank, why_fixed(config))
    Pauses(engine)
    runner = runner_of(engine.runner)
    RankMemory(engine.controls, runner, model, kv_tensors(runner))
    paths = [str(checkpoint.directory) for checkpoint in engine_plan.described.checkpoints]
    checkpoints = [StageCheckpoint(*names) for names in zip(paths, NAME_PREFIXES, strict=False)]
    Sleeps(engine, on_every_rank or engine.controls.take, updates, checkpoints, why_awake(config))
    if options.adapters is not None:
        AdapterUpdates(engine, options.adapters, config.lora, others)


def why_fixed(config: EngineConfig) -> str:
    """Returns why the weights do not change while the engine serves, or ""."""
    mode = config.disaggregation.role
    return (
        ""
        if mode is None
        else f"weights cannot be updated with --disaggregation-mode {mode}: the other node keeps its own"
    )


def why_awake(config: EngineConfig) -> str:
    """Returns why the engine does not give memory back while it serves, or ""."""
    options = {
        "--kv-offload-gib and --kv-offload-dir": config.host_bytes > 0,
        "--disaggregation-mode": config.disaggregation.role is not None,
        "--enable-expert-parallel": config.parallel.spreads,
    }
    return next((f"an engine with {option} does not sleep" for option, used in options.items() if used), "")


def runner_of(runner: ModelRunner) -> Runner:
    """Returns this process's own, without what is around it."""
    while isinstance(runner, EveryRank | StepRecorder):
        runner = runner.runner
    assert isinstance(runner, Runner)
    return runner
