"""Experts that are spread over the engines of --data-parallel-size: from options to who has which, and to the ticks of all engines. Or
over the ranks of one engine."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import torch

from mtpserve.config import EngineConfig
from mtpserve.core.arch import ModelArch, MoEArch
from mtpserve.core.errors import ConfigError
from mtpserve.engine.ticks import Ticks
from mtpserve.runtime.expert_load import ExpertLoad
from mtpserve.runtime.peers import TorchPeers
from mtpserve.runtime.placement import ExpertPlacement, read
from mtpserve.runtime.rounds import Rounds

log = logging.getLogger(__name__)


def with_ranks(config: EngineConfig, arch: ModelArch) -> ModelArch:
    """How the ranks of one engine divide its experts. Raises ConfigError."""
    return replace(arch, moe=replace(experts_of(config, arch), by_rank=True)) if config.parallel.by_rank else arch


def experts_of(config: EngineConfig, arch: ModelArch) -> MoEArch:
    if arch.moe is None:
        raise ConfigError(f"{config.parallel.spreading} spreads the experts of a model, and this one has none: leave it out")
    return arch.moe


def spread_of(config: EngineConfig, arch: ModelArch) -> Rounds | None:
    """None: each engine has all experts. Raises ConfigError."""
    parallel = config.parallel
    size, rank = parallel.data_parallel_size, config.replica
    if not parallel.spreads:
        if parallel.spreading is not None and not parallel.by_rank:
            log.info("%s has no effect with one engine: see --data-parallel-size", parallel.spreading)
        return None
    moe = experts_of(config, arch)
    if moe.experts < size:
        raise ConfigError(f"--data-parallel-size must be at most {moe.experts}, the model's experts, with {parallel.spreading}, got {size}")
    if config.scheduler.record_steps is not None:
        raise ConfigError(f"--record-steps must be left out with {parallel.spreading}: a step cannot be run again by one engine alone")
    layers = {layer: moe.experts for layer in range(len(arch.layers)) if layer not in moe.dense}
    owners = {} if parallel.expert_map is None else read(parallel.expert_map, size, layers)
    load = None if parallel.record_expert_load is None else ExpertLoad(Path(f"{parallel.record_expert_load}.{rank}"))
    return Rounds(ExpertPlacement(rank, size, owners), load)


def meet(config: EngineConfig, spread: Rounds | None, arch: ModelArch, dtype: torch.dtype, device: torch.device) -> Ticks:
    """When the weights are loaded; returns when all engines are there. Raises EngineDead."""
    if spread is None:
        return Ticks()
    assert arch.moe is not None
    place = spread.placement
    log.info("%d experts in each layer, spread over %d engines: waiting for the others", arch.moe.experts, place.size)
    peers = TorchPeers(place.rank, place.size, device, config.meeting)
    spread.join(peers, arch.moe.latent or arch.hidden, arch.moe.top_k, dtype, device)
    return Ticks(peers, spread.finish)
