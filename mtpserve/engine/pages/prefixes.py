"""What requests share: which pages of its prompt a request finds in the cache, and which pages of its own others may find.

A page is found once its last token is booked and none of its rows is deferred, also while its request still runs. Pages that a running
request is just computing, or that come from a tier below the device, are worth waiting for: `columns` says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence as Seq

from mtpserve.cache.groups import PageGroups
from mtpserve.cache.keys import Key, extend
from mtpserve.core.plan import KeptState, SpanPlan
from mtpserve.core.protocols.observers import CacheObserver
from mtpserve.core.request import Finish
from mtpserve.core.sequence import Sequence
from mtpserve.engine.pages.exports import Exports
from mtpserve.engine.pages.output_states import OutputStates
from mtpserve.engine.pages.tiers import Tiers

KEEP_EVERY = 2048  # tokens of a prompt, after which a state is kept in addition
PATIENCE = 3  # loadings for which a request waits before it starts with what is there


class Prefixes:
    def __init__(self, pages: PageGroups, observer: CacheObserver | None = None, tiers: Tiers | None = None) -> None:
        self._pages, self._observer, self._tiers = pages, observer, tiers
        self._outputs = OutputStates(pages)
        pages.on_evict = self._evicted
        if tiers is not None:
            tiers.on_gone = self._gone
        self._told: set[Key] = set()  # what observers take for there; kept with tiers alone
        self._coming: dict[Key, str] = {}  # keys of pages that are being computed, and for which request

    def add(self, seq: Sequence) -> None:
        """A request arrives."""
        self._extend(seq, seq.prefill_end)
        self._pulls(seq, self._usable(seq))  # they come while it waits for a seat

    def columns(self, seq: Sequence) -> int | None:
        """Columns of a waiting request that are in the cache. None: it finds more in a few steps, or once another node has it."""
        keys = self._usable(seq)
        if self._pulls(seq, keys):
            return None
        columns = seq.matched = self._pages.matched(keys)
        if columns == len(keys):
            return columns
        if keys[columns] in self._coming:
            return None
        room = self._pages.has_room(self._pages.columns(len(seq.tokens) + seq.lookahead) - columns)
        return None if room and self._waits(seq, keys, columns) else columns

    def _usable(self, seq: Sequence) -> Seq[Key]:
        """Of the columns of a request that it may start after; none where the prompt's log-probabilities are still to come: each of its
        rows is computed. A state is that after a column, and at least one token is computed after it."""
        if seq.sampling.prompt_logprobs is not None and seq.prompt_scored < seq.prompt_len - 1:
            return []
        return seq.keys[: (seq.prefill_end - 1) // self._pages.page_size] if self._pages.has_states else seq.keys

    def _waits(self, seq: Sequence, keys: Seq[Key], columns: int) -> bool:
        """For pages on their way from below the device. Not for ever: what one request waits for may push out what others waited for."""
        if self._tiers is None or seq.loads >= PATIENCE:
            return self._tiers is not None and self._tiers.is_loading(seq.loading)
        number = self._tiers.bring(keys, columns)
        if number is not None and number != seq.loading:
            seq.loading, seq.loads = number, seq.loads + 1
        return number is not None

    def expected(self, seq: Sequence) -> int:
        """Roughly what `columns` says, without looking for each page again."""
        seq.matched = self._pages.matched(self._usable(seq), seq.matched)
        return seq.matched

    def seat(self, seq: Sequence, columns: int) -> None:
        """A request starts after so many columns."""
        self._tell_again(seq, columns)
        seq.labelled = seq.vouched = columns
        seq.loads = 0
        for key in seq.keys[columns:]:
            self._coming.setdefault(key, seq.id)
        if self._pages.has_states and seq.root is not None:
            self._plan_states(seq, columns)

    def _plan_states(self, seq: Sequence, columns: int) -> None:
        """Columns after which the state is worth keeping: the last of the prompt, where it leaves others' pages, and every so many tokens
        (Marconi, https://arxiv.org/abs/2411.19379)."""
        usable, every = self._usable(seq), max(KEEP_EVERY // self._pages.page_size, 1)
        branch = self._pages.matched_without_states(usable)
        seq.branch = branch if columns < branch < len(usable) else 0
        seq.keeps = sorted(column for column in {len(usable), branch, *range(0, len(usable), every)} if column > columns)

    def rows(self, seq: Sequence, rows: int) -> int:
        """Of a chunk of a prompt: a span keeps one state, so that it ends before the next one is due where it keeps that of a branch."""
        size, after = self._pages.page_size, [column for column in seq.keeps if column > seq.branch]
        if not after or seq.branch not in seq.keeps or seq.branch * size <= seq.launched:
            return rows
        return min(rows, after[0] * size - 1 - seq.launched)

    def keep(self, decoding: Iterable[tuple[Sequence, SpanPlan]], prompts: Iterable[tuple[Sequence, SpanPlan]]) -> list[KeptState]:
        """The states that a step keeps: one of each span, if any."""
        if not self._pages.has_states:
            return []
        kept = [kept for seq, span in prompts if seq.keeps for kept in self._keep_of_prompt(seq, span)]
        return kept + [kept for seq, span in decoding if seq.root is not None for kept in self._outputs.plan(seq, span)]

    def _keep_of_prompt(self, seq: Sequence, span: SpanPlan) -> list[KeptState]:
        """The last state that a chunk comes to of those that are worth it."""
        size, end = self._pages.page_size, span.start + span.length
        passed = [column for column in seq.keeps if column * size <= end]
        if not passed:
            return []
        seq.keeps = seq.keeps[len(passed) :]
        place = self._pages.keep_state(seq.held, passed[-1] - 1)
        return [] if place is None else [KeptState(span.seat, passed[-1] * size, place)]

    def book(self, seq: Sequence, settled: int, kept: KeptState | None) -> None:
        """Tokens of a request were computed: others may find its whole pages. Its state has gone on to `settled` tokens; `kept` is what
        the plan named."""
        since, seq.settled = seq.settled, settled
        # Tokens after a stop are computed and dropped.
        size = self._pages.page_size
        columns = min(seq.absorbed, len(seq.tokens)) // size
        if seq.root is None:
            return
        if columns > seq.labelled:
            self._extend(seq, columns * size)
            seq.grown |= self._pages.label(seq.held, seq.keys, seq.labelled, columns)
            self._arrived(seq, seq.labelled, columns)
            self._tell(seq, max(seq.labelled, seq.held[0].first), columns)
            seq.labelled = columns
        if seq.output_len > 0 and seq.vouched < seq.labelled:
            if self._tiers is not None:
                self._tiers.completed(seq.held, seq.keys, seq.vouched, seq.labelled)
            seq.vouched = seq.labelled
        if self._pages.has_states:
            self._outputs.book(seq, since, kept)

    def leave(self, seq: Sequence, trusted: bool = True) -> None:
        """A request gives its pages back. Not `trusted`: its numbers may have been wrong long before they showed, and nobody finds them in
        any tier; neither those that it had found itself, which may be why."""
        self._arrived(seq, seq.labelled, len(seq.keys))
        if self._tiers is not None and self._tiers.exports is not None and seq.lease is not None and seq.finish is not None:
            self._export(seq, seq.lease, self._tiers.exports)
        state = self._outputs.leave(seq, trusted) if self._pages.has_states else []
        if state and self._tiers is not None:
            self._tiers.completed(state, seq.keys, state[-1].first, state[-1].end)
        if trusted:
            return
        lost = self._pages.unlabel(seq.held)
        self._pages.unlabel_states(seq.keys)
        if self._tiers is not None:
            self._tiers.distrust(seq.keys)
        for key in lost[0] if lost else []:
            self._gone(key)

    def _export(self, seq: Sequence, lease: str, exports: Exports) -> None:
        """A request has ended whose prompt another node goes on with: it gets what another request with this prompt may start after."""
        if seq.finish in (Finish.STOP, Finish.LENGTH):
            seq.offer = exports.add(lease, seq.keys[: (seq.prompt_len - self._pages.has_states) // self._pages.page_size])
        else:
            exports.refuse(lease)

    def _pulls(self, seq: Sequence, keys: Seq[Key]) -> bool:
        """Whether pages are still to come from another node."""
        return self._tiers is not None and self._tiers.pulls is not None and self._tiers.pulls.waits(seq, keys)

    @property
    def states(self) -> list[int]:
        """Pages of states that are held besides those of requests."""
        return self._outputs.pages

    def forget(self, running: Iterable[Sequence]) -> None:
        """Empty the cache. What requests hold is found again once they have computed another page."""
        self._pages.forget()
        if self._tiers is not None:
            self._tiers.forget()
        self._told.clear()
        if self._observer is not None:
            self._observer.cleared()
        for seq in running:
            seq.labelled = seq.vouched = 0

    def _evicted(self, group: int, page: int, key: Key) -> None:
        if self._tiers is not None:
            self._tiers.evicted(group, page, key)
        elif group == 0:
            self._gone(key)

    def _gone(self, key: Key) -> None:
        """Observers are told of group 0, which has all columns if any group has."""
        self._told.discard(key)
        if self._observer is not None:
            self._observer.removed([key], "device")

    def _tell(self, seq: Sequence, first: int, end: int) -> None:
        """Observers hear of these columns of a request: no pages that a window has passed, which are not found."""
        size, parent = self._pages.page_size, seq.keys[first - 1] if first else None
        if self._observer is not None and first < end:
            self._observer.stored(seq.keys[first:end], parent, seq.tokens[first * size : end * size], "device")
            if self._tiers is not None:
                self._told.update(seq.keys[first:end])

    def _tell_again(self, seq: Sequence, columns: int) -> None:
        """Of pages that came back from the disk: observers took them for gone."""
        if self._observer is not None and self._tiers is not None:
            for column in self._pages.needed(columns)[0] if columns else ():
                if seq.keys[column] not in self._told:
                    self._tell(seq, column, column + 1)

    def _extend(self, seq: Sequence, end: int) -> None:
        if seq.root is not None:
            extend(seq.keys, seq.root, seq.tokens, end, self._pages.page_size)

    def _arrived(self, seq: Sequence, first: int, end: int) -> None:
        """These columns of a request are there, or it will not compute them."""
        for key in seq.keys[first:end]:
            if self._coming.get(key) == seq.id:
                del self._coming[key]
