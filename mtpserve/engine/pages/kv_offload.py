"""The tiers below the device, from options: host memory, the disk, other nodes."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mtpserve.cache.boundary import BoundaryRows
from mtpserve.cache.disk import DiskPages
from mtpserve.cache.groups import PageGroups
from mtpserve.cache.leases import Leases
from mtpserve.cache.states import States
from mtpserve.cache.stores import Stores
from mtpserve.config import CacheConfig, DisaggregationConfig
from mtpserve.core.errors import ConfigError
from mtpserve.engine.pages.kv_connector import KVConnector
from mtpserve.engine.pages.kv_receiver import KVReceiver
from mtpserve.engine.pages.kv_sender import Exporter, KVSender
from mtpserve.runtime.paging import GroupBlocks, Transfers, block_bytes, host_blocks, parts_of
from mtpserve.runtime.remote.client import PageClient
from mtpserve.runtime.remote.nixl import Nixl
from mtpserve.runtime.remote.server import PageServer
from mtpserve.runtime.remote.shared_memory import SharedBlocks
from mtpserve.runtime.remote.wire import VERSION

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TierOptions:
    """`host`: bytes of host memory for pages, those of all ranks together; `facts`: what they depend on
    besides tokens, see fingerprint.py; `engine`: which of several; `rank`: which of `ranks` that compute one
    model; `file`: of the memory that these share, see runtime/remote/shared_memory."""

    host: int = 0
    cache: CacheConfig = field(default_factory=CacheConfig)
    nodes: DisaggregationConfig = field(default_factory=DisaggregationConfig)
    facts: Mapping[str, str] = field(default_factory=dict)
    engine: int = 0
    rank: int = 0
    ranks: int = 1
    file: int | None = None

    @property
    def computes_prompts(self) -> bool:
        """And nothing else: tokens after them are chosen by another node."""
        return self.nodes.role == "prefill"


def page_parts(
    stores: Stores, states: States | None, boundary: BoundaryRows | None, groups: PageGroups
) -> list[list[Tensor]]:
    """[layers, pages, bytes] views of all that a page of each group holds."""
    parts = [parts_of(stores, group, boundary) for group in range(groups.dense)]
    return parts + ([] if states is None else [[page.flatten(2).view(torch.uint8) for page in states.pages]])


def make_tiers(
    options: TierOptions,
    parts: Seq[Seq[Tensor]],
    groups: PageGroups,
    fingerprint: bytes | None,
    recorder: object | None,
) -> tuple[KVConnector | None, Transfers | None]:
    """And what moves pages between them. None: there are none; ranks but the first only move their parts.
    Raises ConfigError."""
    cache, size, nodes = options.cache, options.host, options.nodes
    if not size:
        return None, None
    if recorder is not None:
        raise ConfigError(
            "--record-steps must be left out with --kv-offload-gib, --kv-offload-dir and "
            "--disaggregation-mode: transfers of KV pages are not recorded"
        )
    block_sizes = [block_bytes(group_tensors) for group_tensors in parts]
    counts = host_counts(options, block_sizes, groups)
    shared = None
    if nodes.keeps or options.ranks > 1:
        shared = SharedBlocks(
            counts, block_sizes, parts[0][0].is_cuda, options.rank, options.ranks, options.file
        )
    blocks = host_blocks(parts, counts) if shared is None else shared.blocks
    moved = [
        GroupBlocks(*group)
        for group in zip(parts, blocks, blocks if shared is None else shared.rank_blocks, strict=True)
    ]
    if options.rank:
        return None, Transfers(moved)
    assert fingerprint is not None
    disk = (
        None
        if cache.kv_offload_dir is None
        else DiskPages(cache.kv_offload_dir, cache.disk_bytes, fingerprint)
    )
    log.info(
        "KV offload: room for %d pages in host memory (%.1f GiB), %s",
        sum(counts),
        size / 2**30,
        cache.kv_offload_dir or "none on disk",
    )
    kv_connector = KVConnector(groups, counts, disk)
    facts = dict(options.facts) | {
        "protocol": VERSION,
        "layout": ", ".join(f"{bytes} bytes" for bytes in block_sizes),
    }
    remote = link_nodes(kv_connector, options, groups, facts, blocks, shared)
    return kv_connector, Transfers(moved, disk, remote)


def host_counts(options: TierOptions, block_sizes: Seq[int], groups: PageGroups) -> list[int]:
    """How many of each group's pages host memory holds: divided as the device divides its pool, since a
    window's pages are few. Raises ConfigError where it is too small for one."""
    total_bytes = options.ranks * sum(
        bytes * group.allocator.num_pages for bytes, group in zip(block_sizes, groups.groups, strict=True)
    )
    counts = [options.host * group.allocator.num_pages // total_bytes for group in groups.groups]
    if min(counts) < 1:
        raise ConfigError(
            f"--kv-offload-gib {options.host / 2**30:g} is less than one KV page of "
            f"{options.ranks * sum(block_sizes)} bytes"
        )
    return counts


def link_nodes(
    kv_connector: KVConnector,
    options: TierOptions,
    groups: PageGroups,
    facts: dict[str, str],
    blocks: Seq[Tensor],
    shared: SharedBlocks | None,
) -> PageClient | None:
    """Gives the tiers what takes pages from other nodes, and what offers them; returns what fetches them.
    None: this node takes none."""
    nodes, remote = options.nodes, None
    backend = nodes.disaggregation_transfer_backend
    nixl = None
    if backend == "nixl" and nodes.role is not None:
        nixl = Nixl(blocks if shared is None else [shared.tensor])
    if nodes.pulls:
        kv_connector.receiver = KVReceiver(kv_connector, groups)
        remote = PageClient(facts, nodes.disaggregation_timeout, backend, nixl)
    if shared is not None and nodes.keeps:
        leases = Leases(nodes.disaggregation_lease)
        server = PageServer(nodes.host, nodes.port(options.engine), facts, shared, leases, nixl)
        kv_connector.sender = KVSender(
            kv_connector, groups, leases, Exporter(server.engine, server.host, server.port)
        )
        kv_connector.on_close = server.close
    return remote
