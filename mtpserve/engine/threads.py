"""The cores and threads of the process that computes."""

from __future__ import annotations

import logging
import os

import torch

from mtpserve.config import CPUConfig
from mtpserve.core.errors import ConfigError

log = logging.getLogger(__name__)


def bind(config: CPUConfig) -> None:
    """Before anything is allocated: memory is taken from the NUMA node of the core that touches it first. Raises ConfigError."""
    if config.cores is not None:
        here = allowed()
        if here is None:
            raise ConfigError("--cpu-affinity: this system does not bind processes to cores")
        if missing := config.cores - here:
            raise ConfigError(f"--cpu-affinity {config.cpu_affinity}: this process may not run on core {min(missing)}")
        os.sched_setaffinity(0, config.cores)
    threads = config.cpu_threads or (len(config.cores) if config.cores is not None else None)
    if threads is not None:
        torch.set_num_threads(threads)
    log.info("%d threads on cores %s", torch.get_num_threads(), config.cpu_affinity or "of the system's choice")


def allowed() -> frozenset[int] | None:
    """The cores that this process may use; None where the system does not tell."""
    return frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
