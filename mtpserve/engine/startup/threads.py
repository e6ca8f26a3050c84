"""The cores and threads of the process that computes."""

from __future__ import annotations

import logging
import os

import torch

from mtpserve.config import EngineConfig
from mtpserve.core.errors import ConfigError
from mtpserve.engine.process.core_share import CoreShare
from mtpserve.engine.startup.compute import device_number, device_of

log = logging.getLogger(__name__)


def bind(config: EngineConfig) -> None:
    """Binds the process to its cores before anything is allocated: memory is taken from the NUMA node of the
    core that touches it first. Each engine, and each rank of it, has a GPU of its own, or a part of the
    cores. Raises ConfigError."""
    cpu, here = config.cpu, allowed()
    if cpu.cores is not None:
        if here is None:
            raise ConfigError("--cpu-affinity: this system cannot bind processes to cores")
        if missing := cpu.cores - here:
            raise ConfigError(
                f"--cpu-affinity {cpu.cpu_affinity}: this process is not allowed to run on core "
                f"{min(missing)}"
            )
    on_gpu = device_of(config).type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device_number(config))
    cores = cpu.cores if on_gpu else process_cores(cpu.cores or here, cpu.cores is not None, config)
    if cores is not None:
        os.sched_setaffinity(0, cores)
    threads = cpu.cpu_threads or (None if cores is None else len(cores))
    ranks = config.parallel.ranks
    if ranks > 1 and not on_gpu and here is not None:
        # All of them alike: what all compute has the same bits then, whatever its kernels do with threads.
        threads = cpu.cpu_threads or max(
            1, len(cpu.cores or here) // (ranks * config.parallel.data_parallel_size)
        )
    wanted, cores_here = (threads or 1) * processes_of(config), len(cpu.cores or here or ())
    if not on_gpu and 0 < cores_here < wanted and config.replica == config.rank == 0:
        log.warning(
            "%d threads on %d cores (%d engine processes with %d threads each) slow each other down; "
            "see --cpu-threads",
            wanted, cores_here, processes_of(config), threads or 1,
        )  # fmt: skip
    if threads is not None:
        torch.set_num_threads(threads)
    log.debug(
        "%d threads on cores %s",
        torch.get_num_threads(),
        "of the system's choice" if cores is None else sorted(cores),
    )


def core_share(config: EngineConfig) -> CoreShare:
    """The threads follow the cores that are free, but where their number was asked for, and among ranks."""
    is_fixed = config.cpu.cpu_threads is not None or config.parallel.ranks > 1
    if is_fixed or device_of(config).type == "cuda":
        return CoreShare()
    return CoreShare(torch.get_num_threads(), torch.set_num_threads)


def processes_of(config: EngineConfig) -> int:
    """The number of all engines' processes on this machine."""
    return config.parallel.data_parallel_size * config.parallel.ranks


def process_cores(
    cores: frozenset[int] | None, is_explicit: bool, config: EngineConfig
) -> frozenset[int] | None:
    """This process's. None: those that the system chooses. Processes that are more than the cores share all
    of them."""
    ranks = config.parallel.ranks
    count, mine = processes_of(config), config.replica * ranks + config.rank
    if cores is None or count == 1 or count > len(cores):
        return cores if is_explicit else None
    return frozenset(sorted(cores)[mine * len(cores) // count : (mine + 1) * len(cores) // count])


def allowed() -> frozenset[int] | None:
    """The cores that this process may use; None where the system does not tell."""
    return frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
