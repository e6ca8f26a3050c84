"""The check that the scheduler's pages, rows and queues agree. Tests call it after every step, the engine
when it is idle."""

from __future__ import annotations

from mtpserve.engine.queue import QUEUE_KEY
from mtpserve.engine.scheduler import Scheduler


def check_integrity(scheduler: Scheduler) -> None:
    """Raises RuntimeError unless pages, rows and queues agree. Without a live request every page and row is
    free."""
    pages, free = scheduler.pages, scheduler.admission.free_req_indices
    loading = [] if scheduler.kv_connector is None else scheduler.kv_connector.holders
    pages.check_integrity(
        [*(req.cache.blocks for req in scheduler.live.values()), *loading], scheduler.prefixes.states
    )
    seats = [req.req_idx for req in scheduler.running if req.req_idx is not None]
    if sorted(seats + free) != list(range(scheduler.max_running)) or len(seats) != len(scheduler.running):
        raise RuntimeError(
            f"{len(scheduler.running)} requests run in seats {sorted(seats)} while {sorted(free)} are free"
        )
    if sorted(req.id for req in (*scheduler.running, *scheduler.waiting)) != sorted(scheduler.live):
        raise RuntimeError("running and waiting requests are not the live ones")
    if any(queue != sorted(queue, key=QUEUE_KEY) for queue in (scheduler.running, scheduler.waiting)):
        raise RuntimeError("running or waiting requests are out of order")
    for req in scheduler.running:
        columns = min(blocks.end for blocks in req.cache.blocks[: pages.dense])
        req.check_counters(columns * pages.page_size, scheduler.max_deferred_tokens)
    for req in scheduler.waiting:
        req.check_waiting()
