"""Experts that are spread over the processes of several engines: from options to who has which, and to the
ticks of all engines. Or over the ranks of one engine."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import torch

from mtpserve.config import EngineConfig
from mtpserve.core.arch.model import ModelArch, MoEArch
from mtpserve.core.errors import ConfigError
from mtpserve.engine.parallel.rank_messages import FinishTick
from mtpserve.engine.parallel.ranks import RankProcesses
from mtpserve.engine.parallel.ticks import Ticks
from mtpserve.runtime.parallel.expert_load import ExpertLoad
from mtpserve.runtime.parallel.peers import TorchPeers
from mtpserve.runtime.parallel.placement import ExpertPlacement, read_owners
from mtpserve.runtime.parallel.rounds import Rounds

log = logging.getLogger(__name__)


def with_ranks(config: EngineConfig, arch: ModelArch) -> ModelArch:
    """Returns the architecture with its experts divided between the ranks of one engine. Raises
    ConfigError."""
    return (
        replace(arch, moe=replace(experts_of(config, arch), by_rank=True))
        if config.parallel.by_rank
        else arch
    )


def experts_of(config: EngineConfig, arch: ModelArch) -> MoEArch:
    if arch.moe is None:
        raise ConfigError(
            f"{config.parallel.spreading} spreads a model's experts, and this model has none: leave "
            "the option out"
        )
    return arch.moe


def spread_of(config: EngineConfig, arch: ModelArch) -> Rounds | None:
    """Returns the rounds of engines that share experts; None: each engine has all experts. Raises
    ConfigError."""
    parallel = config.parallel
    engines, size = parallel.data_parallel_size, parallel.data_parallel_size * parallel.ranks
    if not parallel.spreads:
        if parallel.spreading is not None and not parallel.by_rank:
            log.info("%s has no effect with one engine: see --data-parallel-size", parallel.spreading)
        return None
    moe = experts_of(config, arch)
    if moe.experts < size:
        raise ConfigError(
            f"{parallel.spreading} needs an expert of each layer for each process: at most "
            f"{moe.experts} processes, got {size}"
        )
    if config.scheduler.record_steps is not None:
        raise ConfigError(
            f"--record-steps must be left out with {parallel.spreading}: one engine alone cannot run "
            "a step again"
        )
    layers = {layer: moe.experts for layer in range(len(arch.layers)) if layer not in moe.dense}
    owners = {} if parallel.expert_map is None else read_owners(parallel.expert_map, size, layers)
    file = parallel.record_expert_load if config.rank == 0 else None  # the others have the same rows
    load = None if file is None else ExpertLoad(Path(f"{file}.{config.replica}"))
    return Rounds(ExpertPlacement(config.replica, engines, owners, config.rank, parallel.ranks), load)


def meet(
    config: EngineConfig, spread: Rounds, arch: ModelArch, dtype: torch.dtype, device: torch.device
) -> TorchPeers:
    """Joins the engines when the weights are loaded; returns when all engines are there. Raises
    EngineDead."""
    assert arch.moe is not None
    placement = spread.placement
    owners = f"{placement.engines} engines" + (
        f" of {placement.ranks} processes" if placement.ranks > 1 else ""
    )
    log.info("%d experts per layer, spread over %s: waiting for the other engines", arch.moe.experts, owners)
    peers = TorchPeers(placement.engine, placement.engines, device, f"{config.meeting}.{config.rank}")
    spread.join(peers, arch.moe.latent or arch.hidden, arch.moe.top_k, dtype, device)
    return peers


def ticks_of(spread: Rounds, peers: TorchPeers, others: RankProcesses) -> Ticks:
    """`others`: this engine's."""
    if others.size == 1:
        return Ticks(peers, spread.finish)

    def finish() -> None:
        with others.together():
            others.tell(FinishTick())
            spread.finish()

    return Ticks(peers, finish)
