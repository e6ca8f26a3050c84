"""States of recurrent layers where outputs end, so that a conversation's next turn starts there: of each
request that decodes, the state after its last whole page.

    output   |======|======|==x        last: after the second page, written. next: after the third one, named
    states        freed   last   next  in each plan whose step may come to it. Once it is written, it is the
                                       last one, and the other one is free

How many rows a step adds to the state is known on the device alone: it writes what is named when its rows
come to it, and the host knows afterwards whether they did. While a request runs nobody finds these states;
the last one gets its key at the end.
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec.structs import replace

from mtpserve.cache.groups import PageGroups
from mtpserve.core.plan import SpanPlan
from mtpserve.core.state.cache_state import BlockList
from mtpserve.core.state.request_state import RequestState


@dataclass(slots=True)
class OutputState:
    column: int  # it is the state after this one
    page: int
    is_written: bool = False


@dataclass(slots=True)
class LastStates:
    """One request's states. `next` becomes `last` when it is written and its column has a key."""

    last: OutputState | None = None
    next: OutputState | None = None

    @property
    def states(self) -> list[OutputState]:
        return [state for state in (self.last, self.next) if state is not None]


class OutputStates:
    """They take at most half of the states: the others are for prompts."""

    def __init__(self, pages: PageGroups) -> None:
        self._pages = pages
        self._last_states: dict[str, LastStates] = {}  # by request

    @property
    def pages(self) -> list[int]:
        """Pages of the states that are held here."""
        return [state.page for last_states in self._last_states.values() for state in last_states.states]

    def plan(self, req: RequestState, span: SpanPlan) -> SpanPlan:
        """A span that decodes, with the state that its step keeps if it comes to it."""
        size = self._pages.page_size
        # Between these the step's state may be: steps in flight commit more or fewer tokens.
        start = req.num_scheduled_tokens if req.in_flight else req.cache.num_state_tokens
        end = req.num_scheduled_tokens + span.num_tokens + req.num_pending_outputs * req.num_write_ahead
        column = start // size
        tokens = (column + 1) * size
        state = self._reserve(req, column) if tokens <= end else None
        if state is None:
            return span
        return replace(span, checkpoint=(tokens, state.page))

    def _reserve(self, req: RequestState, column: int) -> OutputState | None:
        """None: there is no room, or another one has to be written first."""
        last_states = self._last_states.setdefault(req.id, LastStates())
        if last_states.next is None:
            if (
                2 * len(self.pages) + 2 <= self._pages.states
                and (page := self._pages.take_state()) is not None
            ):
                last_states.next = OutputState(column, page)
            elif last_states.last is not None:
                last_states.next, last_states.last = OutputState(column, last_states.last.page), None
        return (
            last_states.next if last_states.next is not None and last_states.next.column == column else None
        )

    def commit(self, req: RequestState, since: int, span: SpanPlan) -> None:
        """A step has taken a request's state from `since` tokens to `req.cache.num_state_tokens`; it had to
        keep this one."""
        last_states = self._last_states.get(req.id)
        if last_states is None or last_states.next is None:
            return
        tokens = (last_states.next.column + 1) * self._pages.page_size
        passes = since < tokens <= req.cache.num_state_tokens
        if span.checkpoint == (tokens, last_states.next.page) and passes:
            last_states.next.is_written = True
        if last_states.next.is_written and last_states.next.column < req.cache.num_hashed_blocks:
            self._free(last_states.last)
            last_states.last, last_states.next = last_states.next, None
        elif tokens <= req.cache.num_state_tokens and not last_states.next.is_written:
            self._free(last_states.next)
            last_states.next = None

    def leave(self, req: RequestState, trusted: bool) -> list[BlockList]:
        """A request gives its pages back → the state that others find from now on, by group of pages; empty:
        none. Not `trusted`: its numbers may be wrong."""
        last_states = self._last_states.pop(req.id, LastStates())
        self._free(last_states.next)
        if last_states.last is None or not trusted or last_states.last.column >= req.cache.num_hashed_blocks:
            self._free(last_states.last)
            return []
        return self._pages.give_state(
            last_states.last.page, last_states.last.column, req.cache.block_hashes[last_states.last.column]
        )

    def _free(self, state: OutputState | None) -> None:
        if state is not None:
            self._pages.free_state(state.page)
