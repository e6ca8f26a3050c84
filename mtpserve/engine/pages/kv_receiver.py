"""Pages of waiting requests on their way from the node that has computed them, into host memory; from there
they are loaded as others are.

A request asks once, for all whole pages of its prompt that this node lacks, and waits until each has come or
will not. What does not come is computed here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence as Seq

from mtpserve.cache.groups import PageGroups
from mtpserve.cache.keys import Key
from mtpserve.cache.leases import Place
from mtpserve.core.plan import Transferred
from mtpserve.core.state.request_state import RequestState
from mtpserve.engine.pages.host import HostMemory

NO_ROOM = "no_room"  # why pages were not asked for


class KVReceiver:
    def __init__(self, host: HostMemory, pages: PageGroups) -> None:
        self._host, self._pages = host, pages
        self._coming: dict[Place, int] = {}  # the batch in which each comes
        self._batches: dict[int, set[int]] = {}  # numbers of the transfers that have not ended
        self._void: set[int] = set()  # transfers whose pages must not be found
        self._count = 0
        self.failed: dict[str, int] = defaultdict(int)  # pages, by reason

    @property
    def pending(self) -> bool:
        return bool(self._batches)

    def waits(self, req: RequestState, keys: Seq[Key]) -> bool:
        """True if columns with these `keys` are still to come. The request may start after them."""
        if req.request.source is None:
            return False
        if req.cache.kv_transfers is None and not self._ask(req, keys):
            return True
        return self.open(req)

    def open(self, req: RequestState) -> bool:
        """Some of what the request has asked for is still to come."""
        return req.cache.kv_transfers is not None and not self._batches.keys().isdisjoint(
            req.cache.kv_transfers
        )

    def _ask(self, req: RequestState, keys: Seq[Key]) -> bool:
        """False: there will be room for its pages once others have come."""
        assert req.request.source is not None
        required_columns = self._pages.required_columns(len(keys)) if keys else []
        places = [
            (group, keys[column]) for group, columns in enumerate(required_columns) for column in columns
        ]
        lacking = [page_id for page_id in places if page_id in self._coming or not self._touch(page_id)]
        missing = [page_id for page_id in lacking if page_id not in self._coming]
        blocks = self._blocks(missing)
        if blocks is None and self._batches:
            return False
        req.cache.kv_transfers = frozenset(
            self._coming[page_id] for page_id in lacking if page_id in self._coming
        )
        if blocks is None:
            self.failed[NO_ROOM] += len(missing)
        elif missing:
            self._count += 1
            req.cache.kv_transfers |= {self._count}
            self._coming |= dict.fromkeys(missing, self._count)
            self._batches[self._count] = {
                self._host.move("pull", group, block, key=key, source=req.request.source)
                for (group, key), block in zip(missing, blocks, strict=True)
            }  # fmt: skip
        return True

    def _touch(self, page_id: Place) -> bool:
        """Mark a page of host memory as recently used. False: no tier has the page."""
        group, key = page_id
        if key in self._host.groups[group].blocks:
            self._host.groups[group].blocks.move_to_end(key)  # room is made at others' expense
        return self._host.has_page(group, key)

    def _blocks(self, places: Seq[Place]) -> list[int] | None:
        """One for each, pinned. None: there are too few."""
        blocks = list[int]()
        for group, _ in places:
            new_block = self._host.take(group)
            if new_block is None:
                for (its, key), block in zip(places, blocks, strict=False):
                    self._host.release(its, key, block)
                return None
            self._host.groups[group].pins[new_block] += 1
            blocks.append(new_block)
        return blocks

    def commit(self, result: Transferred) -> None:
        moved = result.transfer
        page_id = moved.group, moved.key
        batch = self._coming.pop(page_id)
        self._batches[batch].remove(moved.number)
        if not self._batches[batch]:
            del self._batches[batch]
        if not result.good:
            self.failed[result.reason] += 1
        elif moved.number not in self._void:
            self._host.groups[moved.group].blocks.setdefault(moved.key, moved.block)
        self._void.discard(moved.number)
        self._host.release(moved.group, moved.key, moved.block)

    def forget(self) -> None:
        """What is under way comes to nothing."""
        for numbers in self._batches.values():
            self._void |= numbers
