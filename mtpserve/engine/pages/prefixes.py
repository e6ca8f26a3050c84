"""What requests share: which pages of its prompt a request finds in the cache, and which pages of its own
others may find.

A page is found once its last token is booked and none of its rows is deferred, also while its request still
runs. Pages that a running request is just computing, or that come from a tier below the device, are worth
waiting for: `columns` says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence as Seq

from msgspec.structs import replace

from mtpserve.cache.groups import PageGroups
from mtpserve.cache.keys import Key, extend, root
from mtpserve.core.plan import SpanPlan
from mtpserve.core.protocols.adapters import LoRARequest
from mtpserve.core.protocols.observers import CacheObserver
from mtpserve.core.request import Finish
from mtpserve.core.state.request_state import RequestState
from mtpserve.engine.pages.kv_connector import KVConnector
from mtpserve.engine.pages.kv_sender import KVSender
from mtpserve.engine.pages.output_states import OutputStates

KEEP_EVERY = 2048  # tokens of a prompt, after which a state is kept in addition
PATIENCE = 3  # loadings for which a request waits before it starts with what is there


class Prefixes:
    def __init__(
        self,
        pages: PageGroups,
        observer: CacheObserver | None = None,
        kv_connector: KVConnector | None = None,
    ) -> None:
        self._pages, self._observer, self._kv_connector = pages, observer, kv_connector
        self._outputs = OutputStates(pages)
        pages.on_evict = self._evicted
        if kv_connector is not None:
            kv_connector.on_gone = self._gone
        self._announced: set[Key] = set()  # what observers take for there; kept with tiers alone
        # keys of pages that are being computed, and for which request
        self._pending_keys: dict[Key, str] = {}

    def add(self, req: RequestState) -> None:
        """A request arrives."""
        self._extend(req, req.prefill_end)
        self._waits_for_transfer(req, self._usable(req))  # they come while it waits for a seat

    def columns(self, req: RequestState) -> int | None:
        """Columns of a waiting request that are in the cache. None: it finds more in a few steps, or once
        another node has it."""
        keys = self._usable(req)
        if self._waits_for_transfer(req, keys):
            return None
        columns = req.cache.num_matched_blocks = self._pages.matched(keys)
        if columns == len(keys):
            return columns
        if keys[columns] in self._pending_keys:
            return None
        room = self._pages.has_room(self._pages.columns(len(req.tokens) + req.num_lookahead_tokens) - columns)
        return None if room and self._waits(req, keys, columns) else columns

    def _usable(self, req: RequestState) -> Seq[Key]:
        """Keys of the columns that a request may start after. There are none while prompt log-probabilities
        are to come: they need each row. At least one token is computed after a column's state."""
        if (
            req.sampling.prompt_logprobs is not None
            and req.num_scored_prompt_tokens < req.num_prompt_tokens - 1
        ):
            return []
        return (
            req.cache.block_hashes[: (req.prefill_end - 1) // self._pages.page_size]
            if self._pages.has_states
            else req.cache.block_hashes
        )

    def _waits(self, req: RequestState, keys: Seq[Key], columns: int) -> bool:
        """True if a request waits for pages of lower tiers. It waits PATIENCE times at most: its pages may
        evict those of other requests."""
        if self._kv_connector is None or req.cache.num_kv_loads >= PATIENCE:
            return self._kv_connector is not None and self._kv_connector.is_loading(req.cache.kv_load)
        number = self._kv_connector.bring(keys, columns)
        if number is not None and number != req.cache.kv_load:
            req.cache.kv_load, req.cache.num_kv_loads = number, req.cache.num_kv_loads + 1
        return number is not None

    def expected(self, req: RequestState) -> int:
        """Roughly what `columns` says, without looking for each page again."""
        req.cache.num_matched_blocks = self._pages.matched(self._usable(req), req.cache.num_matched_blocks)
        return req.cache.num_matched_blocks

    def seat(self, req: RequestState, columns: int) -> None:
        """A request starts after so many columns."""
        self._tell_again(req, columns)
        req.cache.num_hashed_blocks = req.cache.num_verified_blocks = columns
        req.cache.num_kv_loads = 0
        for key in req.cache.block_hashes[columns:]:
            self._pending_keys.setdefault(key, req.id)
        if self._pages.has_states and req.cache.hash_root is not None:
            self._plan_states(req, columns)

    def _plan_states(self, req: RequestState, columns: int) -> None:
        """Columns after which the state is worth keeping: the last of the prompt, where it leaves others'
        pages, and every so many tokens (Marconi, https://arxiv.org/abs/2411.19379)."""
        usable, every = self._usable(req), max(KEEP_EVERY // self._pages.page_size, 1)
        branch = self._pages.matched_without_states(usable)
        req.cache.branch_block = branch if columns < branch < len(usable) else 0
        req.cache.checkpoint_blocks = sorted(
            column for column in {len(usable), branch, *range(0, len(usable), every)} if column > columns
        )

    def rows(self, req: RequestState, rows: int) -> int:
        """Rows of a prompt's chunk. A span keeps one state: one that keeps a branch's state ends before the
        next state is due."""
        size, after = (
            self._pages.page_size,
            [column for column in req.cache.checkpoint_blocks if column > req.cache.branch_block],
        )
        if (
            not after
            or req.cache.branch_block not in req.cache.checkpoint_blocks
            or req.cache.branch_block * size <= req.num_scheduled_tokens
        ):
            return rows
        return min(rows, after[0] * size - 1 - req.num_scheduled_tokens)

    def with_checkpoints(
        self, decoding: list[tuple[RequestState, SpanPlan]], prompts: list[tuple[RequestState, SpanPlan]]
    ) -> list[tuple[RequestState, SpanPlan]]:
        """All spans of a step, with the states that it keeps: one of each span, if any."""
        if not self._pages.has_states:
            return decoding + prompts
        prompts = [
            (req, self._checkpoint_prompt(req, span) if req.cache.checkpoint_blocks else span)
            for req, span in prompts
        ]
        decoding = [
            (req, span if req.cache.hash_root is None else self._outputs.plan(req, span))
            for req, span in decoding
        ]
        return decoding + prompts

    def _checkpoint_prompt(self, req: RequestState, span: SpanPlan) -> SpanPlan:
        """The last state that a chunk comes to of those that are worth it."""
        size, end = self._pages.page_size, span.start + span.num_tokens
        passed = [column for column in req.cache.checkpoint_blocks if column * size <= end]
        if not passed:
            return span
        req.cache.checkpoint_blocks = req.cache.checkpoint_blocks[len(passed) :]
        page = self._pages.keep_state(req.cache.blocks, passed[-1] - 1)
        if page is None:
            return span
        return replace(span, checkpoint=(passed[-1] * size, page))

    def commit(self, req: RequestState, settled: int, span: SpanPlan) -> None:
        """Tokens of a request were computed: others may find its whole pages. Its state has gone on to
        `settled` tokens."""
        cache = req.cache
        since, cache.num_state_tokens = cache.num_state_tokens, settled
        if cache.hash_root is None:
            return
        # Tokens after a stop are computed and dropped.
        size, hashed = self._pages.page_size, cache.num_hashed_blocks
        columns = min(cache.num_stored_tokens, len(req.tokens)) // size
        if columns > hashed:
            self._extend(req, columns * size)
            cache.has_new_blocks |= self._pages.label(cache.blocks, cache.block_hashes, hashed, columns)
            self._resolve_pending(req, hashed, columns)
            self._announce(req, max(hashed, cache.blocks[0].first), columns)
            cache.num_hashed_blocks = columns
        verified = cache.num_verified_blocks
        if verified < cache.num_hashed_blocks and req.num_output_tokens > 0:
            if self._kv_connector is not None:
                self._kv_connector.completed(
                    cache.blocks, cache.block_hashes, verified, cache.num_hashed_blocks
                )
            cache.num_verified_blocks = cache.num_hashed_blocks
        if self._pages.has_states:
            self._outputs.commit(req, since, span)

    def leave(self, req: RequestState, trusted: bool = True) -> None:
        """A request gives its pages back. Not `trusted`: its numbers may have been wrong long before they
        showed, and nobody finds them in any tier; neither those that it had found itself, which may be
        why."""
        self._resolve_pending(req, req.cache.num_hashed_blocks, len(req.cache.block_hashes))
        if (
            self._kv_connector is not None
            and self._kv_connector.sender is not None
            and req.request.kv_offer_id is not None
            and req.finish is not None
        ):
            self._export(req, req.request.kv_offer_id, self._kv_connector.sender)
        state = self._outputs.leave(req, trusted) if self._pages.has_states else []
        if state and self._kv_connector is not None:
            self._kv_connector.completed(state, req.cache.block_hashes, state[-1].first, state[-1].end)
        if trusted:
            return
        lost = self._pages.unlabel(req.cache.blocks)
        self._pages.unlabel_states(req.cache.block_hashes)
        if self._kv_connector is not None:
            self._kv_connector.distrust(req.cache.block_hashes)
        for key in lost[0] if lost else []:
            self._gone(key)

    def _export(self, req: RequestState, lease: str, exports: KVSender) -> None:
        """A request has ended whose prompt another node goes on with: it gets what another request with this
        prompt may start after."""
        if req.finish in (Finish.STOP, Finish.LENGTH):
            req.cache.kv_offer = exports.add(
                lease,
                req.cache.block_hashes[
                    : (req.num_prompt_tokens - self._pages.has_states) // self._pages.page_size
                ],
            )
        else:
            exports.refuse(lease)

    def _waits_for_transfer(self, req: RequestState, keys: Seq[Key]) -> bool:
        """True if pages are still to come from another node."""
        return (
            self._kv_connector is not None
            and self._kv_connector.receiver is not None
            and self._kv_connector.receiver.waits(req, keys)
        )

    @property
    def states(self) -> list[int]:
        """Pages of states that are held besides those of requests."""
        return self._outputs.pages

    def forget(self, running: Iterable[RequestState]) -> None:
        """Empty the cache. What requests hold is found again once they have computed another page."""
        self._pages.forget()
        if self._kv_connector is not None:
            self._kv_connector.forget()
        self._announced.clear()
        if self._observer is not None:
            self._observer.cleared()
        for req in running:
            req.cache.num_hashed_blocks = req.cache.num_verified_blocks = 0

    def renew(
        self,
        waiting: Iterable[RequestState],
        fingerprint: bytes | None,
        of_adapter: Callable[[LoRARequest | None], bytes],
    ) -> None:
        """Empty the cache. Requests find and leave pages with another fingerprint from now on, and with their
        adapter's."""
        self.forget([])
        for req in waiting:
            if req.cache.hash_root is not None and fingerprint is not None:
                req.cache.hash_root = root(fingerprint + of_adapter(req.request.lora), req.request.salt)
                req.cache.block_hashes, req.cache.num_matched_blocks = [], 0
                self.add(req)

    def _evicted(self, group: int, page: int, key: Key) -> None:
        if self._kv_connector is not None:
            self._kv_connector.evicted(group, page, key)
        elif group == 0:
            self._gone(key)

    def _gone(self, key: Key) -> None:
        """Observers are told of group 0, which has all columns if any group has."""
        self._announced.discard(key)
        if self._observer is not None:
            self._observer.removed([key], "device")

    def _announce(self, req: RequestState, first: int, end: int) -> None:
        """Observers hear of these columns of a request: no pages that a window has passed, which are not
        found."""
        size, parent = self._pages.page_size, req.cache.block_hashes[first - 1] if first else None
        if self._observer is not None and first < end:
            self._observer.stored(
                req.cache.block_hashes[first:end], parent, req.tokens[first * size : end * size], "device"
            )
            if self._kv_connector is not None:
                self._announced.update(req.cache.block_hashes[first:end])

    def _tell_again(self, req: RequestState, columns: int) -> None:
        """Announce pages that came back from the disk: observers took them for gone."""
        if self._observer is not None and self._kv_connector is not None:
            for column in self._pages.required_columns(columns)[0] if columns else ():
                if req.cache.block_hashes[column] not in self._announced:
                    self._announce(req, column, column + 1)

    def _extend(self, req: RequestState, end: int) -> None:
        if req.cache.hash_root is not None:
            extend(req.cache.block_hashes, req.cache.hash_root, req.tokens, end, self._pages.page_size)

    def _resolve_pending(self, req: RequestState, first: int, end: int) -> None:
        """No request waits for these columns: they are there, or this request will not compute them."""
        for key in req.cache.block_hashes[first:end]:
            if self._pending_keys.get(key) == req.id:
                del self._pending_keys[key]
