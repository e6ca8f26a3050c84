"""What moves pages between the device's pool, host memory, the disk and other nodes; which ones,
engine/pages/kv_connector says.

A block of host memory holds one page of one group: what all layers with these pages stored for its tokens,
side by side, and the boundary row (cache/boundary). So a page moves as one piece.

    block    | store 0: keys of all layers | store 0: values | store 1: … | boundary row |

With tensor parallel a block has such a part for each rank, which saves and loads it; between blocks, files
and other nodes rank 0 moves whole ones.

A save is in time if it reads its page after the steps that were launched before it and before those after it
write. A load may start once the steps that were launched before it have ended: its page may have been
somebody else's.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from threading import Thread
from time import perf_counter
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from mtpserve.cache.boundary import BoundaryRows
from mtpserve.cache.disk import DiskPages
from mtpserve.cache.stores import Stores
from mtpserve.core.kv_transfer import PageSource
from mtpserve.core.plan import Transfer, Transferred
from mtpserve.runtime.remote.client import Fetched, PageClient, WantedPage

log = logging.getLogger(__name__)

WORKERS = 4  # threads: checksums and files keep one each busy
PATIENCE_S = 0.01  # how long a step that has nothing else to do waits for a transfer


POLL_S = 0.0005
FAILED = "failed"  # why a page was not moved, where nothing more is known


def parts_of(stores: Stores, group: int, boundary: BoundaryRows | None) -> list[Tensor]:
    """[layers, pages, bytes] views of all that is stored in the pages of one group. The boundary rows are
    group 0's."""
    views = [view for pool in stores.pools_of(group) for view in pool.by_page]
    return (
        [*views, boundary.rows.unsqueeze(0).view(torch.uint8)]
        if group == 0 and boundary is not None
        else views
    )


def block_bytes(parts: Seq[Tensor]) -> int:
    """Bytes of one page."""
    return sum(tensor.shape[0] * tensor.shape[2] for tensor in parts)


@dataclass(frozen=True, slots=True)
class GroupBlocks:
    """The pages of one group, and the blocks [blocks, bytes] uint8 of host memory for them.
    `rank_blocks`: this rank's part of each block."""

    parts: Seq[Tensor]
    blocks: Tensor
    rank_blocks: Tensor

    def pieces(self, page: int, block: int) -> list[tuple[Tensor, Tensor]]:
        """Views [layers, bytes] of the device's page and of the block, part by part."""
        pairs, start = list[tuple[Tensor, Tensor]](), 0
        for tensor in self.parts:
            layers, _, size = tensor.shape
            pairs.append(
                (tensor[:, page], self.rank_blocks[block, start : start + layers * size].view(layers, size))
            )
            start += layers * size
        return pairs


class Job(Protocol):
    """A transfer under way."""

    def done(self) -> bool: ...

    def result(self) -> tuple[str, float]:
        """Why it came to nothing, "" if it did not, and the seconds that it took. Once it is done. Raises
        what the transfer raised."""
        ...


class Ended:
    """It was done at once."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def done(self) -> bool:
        return True

    def result(self) -> tuple[str, float]:
        return "", self.seconds


@dataclass(frozen=True, slots=True)
class PulledPage:
    """One page of those that are read from another node together."""

    future: Future[Fetched]
    index: int

    def done(self) -> bool:
        return self.future.done()

    def result(self) -> tuple[str, float]:
        fetched = self.future.result()
        return fetched.missing[self.index], fetched.seconds / len(fetched.missing)


class CPUCopies:
    """Saves at once, since the next step may write; loads in a thread."""

    def __init__(self, threads: ThreadPoolExecutor) -> None:
        self._threads = threads

    def save(self, group: GroupBlocks, pages: Seq[Transfer]) -> list[Job]:
        return [Ended(_timed(_copied, group, transfer.page, transfer.block, False)[1]) for transfer in pages]

    def load(self, group: GroupBlocks, pages: Seq[Transfer]) -> list[Job]:
        return [
            self._threads.submit(_timed, _copied, group, transfer.page, transfer.block, True)
            for transfer in pages
        ]


def _copied(group: GroupBlocks, page: int, block: int, up: bool) -> bool:
    # By numpy: torch would start threads of its own beside those of the step.
    for device, host in group.pieces(page, block):
        target, source = (device, host) if up else (host, device)
        np.copyto(target.numpy(), source.numpy())
    return True


def _timed(work: Callable[..., bool], *arguments: object) -> tuple[str, float]:
    began = perf_counter()
    return "" if work(*arguments) else FAILED, perf_counter() - began


def _in_thread(work: Callable[[], Fetched]) -> Future[Fetched]:
    """Run `work` in a new thread. The process does not wait for it at its end."""
    future = Future[Fetched]()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, name="pull pages", daemon=True).start()
    return future


class CudaJob:
    """Ends with what the stream has got so far."""

    def __init__(self, began: torch.cuda.Event) -> None:
        self._began, self._end = began, torch.cuda.Event(enable_timing=True)
        self._end.record()

    def done(self) -> bool:
        return bool(self._end.query())

    def result(self) -> tuple[str, float]:
        return "", self._began.elapsed_time(self._end) / 1000


class CudaCopies:
    """On a stream of their own. A page that is saved is copied on the device first, by the stream of the
    steps, so that these need not wait for its way to the host."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()

    def save(self, group: GroupBlocks, pages: Seq[Transfer]) -> list[Job]:
        staged = [
            [(device.contiguous(), host) for device, host in group.pieces(transfer.page, transfer.block)]
            for transfer in pages
        ]
        return self._moved([[(host, copy) for copy, host in pairs] for pairs in staged])

    def load(self, group: GroupBlocks, pages: Seq[Transfer]) -> list[Job]:
        return self._moved([group.pieces(transfer.page, transfer.block) for transfer in pages])

    def _moved(self, pages: Seq[Seq[tuple[Tensor, Tensor]]]) -> list[Job]:
        """(target, source) of each page's parts."""
        self._stream.wait_stream(torch.cuda.current_stream())
        jobs = list[Job]()
        with torch.cuda.stream(self._stream):
            for pairs in pages:
                began = torch.cuda.Event(enable_timing=True)
                began.record()
                for target, source in pairs:
                    target.copy_(source, non_blocking=True)
                    for tensor in (target, source):
                        if tensor.is_cuda:
                            tensor.record_stream(self._stream)
                jobs.append(CudaJob(began))
        return jobs


def host_blocks(parts: Seq[Seq[Tensor]], counts: Seq[int]) -> list[Tensor]:
    """So many blocks of each group, [blocks, bytes] uint8 in memory that is the process's own."""
    cuda = parts[0][0].is_cuda
    return [
        torch.empty(count, block_bytes(group_tensors), dtype=torch.uint8, pin_memory=cuda)
        for group_tensors, count in zip(parts, counts, strict=True)
    ]


class Transfers:
    """`groups`: what is moved. `remote`: reads pages from other nodes."""

    def __init__(
        self, groups: Seq[GroupBlocks], disk: DiskPages | None = None, remote: PageClient | None = None
    ) -> None:
        self.groups, cuda = groups, groups[0].parts[0].is_cuda
        self._disk, self._remote = disk, remote
        self._threads = ThreadPoolExecutor(WORKERS, thread_name_prefix="pages")
        self._copies = CudaCopies() if cuda else CPUCopies(self._threads)
        self._moving: list[tuple[Transfer, Job]] = []

    def start(self, transfers: Seq[Transfer]) -> None:
        """Start transfers in the order of the device's work: after launched steps, before later ones."""
        for number, group in enumerate(self.groups):
            group_transfers = [transfer for transfer in transfers if transfer.group == number]
            saves, loads = (
                [transfer for transfer in group_transfers if transfer.kind == kind]
                for kind in ("save", "load")
            )
            self._moving += zip(saves, self._copies.save(group, saves), strict=True)
            self._moving += zip(loads, self._copies.load(group, loads), strict=True)
            self._moving += [
                (transfer, self._threads.submit(_timed, self._filed, transfer))
                for transfer in group_transfers
                if transfer.kind in ("spill", "fetch")
            ]
        pulls = defaultdict[PageSource, list[Transfer]](list)
        for transfer in transfers:
            if transfer.source is not None:
                pulls[transfer.source].append(transfer)
        for source, source_transfers in pulls.items():
            self._pull(source, source_transfers)

    def _pull(self, source: PageSource, pages: Seq[Transfer]) -> None:
        assert self._remote is not None
        targets = [
            WantedPage(
                transfer.group, transfer.key, self.groups[transfer.group].blocks[transfer.block].numpy()
            )
            for transfer in pages
        ]
        future = _in_thread(partial(self._remote.fetch, source, targets))
        self._moving += [(transfer, PulledPage(future, index)) for index, transfer in enumerate(pages)]

    def ended(self, idle: bool) -> list[Transferred]:
        """The transfers that have ended since the last call. `idle`: there is no other work, so it waits for
        one."""
        until = perf_counter() + PATIENCE_S
        while (
            idle
            and self._moving
            and not any(job.done() for _, job in self._moving)
            and perf_counter() < until
        ):
            time.sleep(POLL_S)
        moving, over = list[tuple[Transfer, Job]](), list[tuple[Transfer, Job]]()
        for entry in self._moving:
            (over if entry[1].done() else moving).append(entry)
        self._moving = moving
        return [self._outcome(*entry) for entry in over]

    def _filed(self, transfer: Transfer) -> bool:
        """Between a block and its file, in a thread."""
        assert self._disk is not None
        block = self.groups[transfer.group].blocks[transfer.block].numpy().data
        moved = self._disk.read if transfer.kind == "fetch" else self._disk.write
        return moved(transfer.group, transfer.key, block)

    def _outcome(self, transfer: Transfer, job: Job) -> Transferred:
        group = self.groups[transfer.group]
        size = (group.rank_blocks if transfer.of_each_rank else group.blocks).shape[1]
        try:
            reason, seconds = job.result()
        except Exception:
            log.exception("a KV page could not be transferred: %s", transfer.kind)
            reason, seconds = FAILED, 0.0
        return Transferred(transfer, not reason, seconds, size, reason)
