"""NIXL, which is an extra: pages are read from the other node's memory, over whatever joins the two
(InfiniBand, RoCE, TCP, shared memory). UCX chooses, as UCX_TLS and UCX_NET_DEVICES let it."""

from __future__ import annotations

import logging
import time
import uuid
from collections import OrderedDict
from collections.abc import Sequence as Seq
from importlib import import_module
from threading import Lock
from typing import Any

from torch import Tensor

from mtpserve.core.errors import ConfigError

log = logging.getLogger(__name__)

MODULES = ("nixl_cu12._api", "nixl_cu13._api", "nixl._api")
KEPT = 64  # nodes that are known
POLL_S = 0.0002


class Nixl:
    """An agent that reads into `blocks`, and lets others read from them: uint8, in host memory. For several
    threads. Raises ConfigError where NIXL is not installed, or does not start."""

    def __init__(self, blocks: Seq[Tensor]) -> None:
        api = _api()
        try:
            self._agent: Any = api.nixl_agent(uuid.uuid4().hex, api.nixl_agent_config(backends=["UCX"]))
            self._agent.register_memory(
                [(block.data_ptr(), block.numel(), 0, "") for block in blocks], "DRAM"
            )
            self.metadata: bytes = self._agent.get_agent_metadata()
        except Exception as error:  # its own kinds, of C++
            raise ConfigError(
                f"--disaggregation-transfer-backend nixl: {type(error).__name__}: {error}"
            ) from error
        self._lock, self._peers = Lock(), OrderedDict[bytes, str]()

    def read(self, peer: bytes, places: Seq[tuple[int, int, int]], seconds: float) -> bool:
        """(address there, address here, bytes) of each. False: it failed, or took longer than that."""
        try:
            return not places or self._read(peer, places, time.monotonic() + seconds)
        except Exception as error:  # its own kinds, of C++
            log.warning("NIXL: %s: %s", type(error).__name__, error)
            return False

    def _read(self, peer: bytes, places: Seq[tuple[int, int, int]], until: float) -> bool:
        with self._lock:
            there = self._agent.get_xfer_descs([(start, size, 0) for start, _, size in places], "DRAM")
            here = self._agent.get_xfer_descs([(start, size, 0) for _, start, size in places], "DRAM")
            handle = self._agent.initialize_xfer("READ", here, there, self._agent_name(peer))
            state = self._agent.transfer(handle)
        while state == "PROC" and time.monotonic() < until:
            time.sleep(POLL_S)
            with self._lock:
                state = self._agent.check_xfer_state(handle)
        with self._lock:
            self._agent.release_xfer_handle(handle)
        return bool(state == "DONE")

    def _agent_name(self, peer: bytes) -> str:
        if peer not in self._peers:
            self._peers[peer] = self._agent.add_remote_agent(peer)
            if len(self._peers) > KEPT:
                self._agent.remove_remote_agent(self._peers.popitem(last=False)[1])
        self._peers.move_to_end(peer)
        return self._peers[peer]


def _api() -> Any:
    for name in MODULES:
        try:
            api = import_module(name)
            logging.getLogger("nixl").setLevel(logging.WARNING)  # else it writes to standard output
            return api
        except ImportError as error:
            log.debug("%s: %s", name, error)
    raise ConfigError(
        "--disaggregation-transfer-backend nixl needs NIXL: pip install nixl-cu12; auto and tcp need nothing"
    )
