"""The ticks in which engines that share their experts compute; all begin and end them together.

    asleep ── work, or a Join with a new number ──→ gather ─┬─ somebody has work: a tick ──→ gather …
                                                            └─ nobody has ──→ asleep
    tick   steps, and rounds until all are done

A tick begins with a gather: each brings whether it has work, and the highest number of a Join that it has
heard of. In a tick an engine may do any number of steps or none; it takes part in the rounds of the others
(runtime/parallel/rounds) until all have finished theirs.

The front end numbers the requests that it gives to any of the engines. Each is a Submit to one of them and
then, with its number, a Join to all, so that an engine that has heard of number n has got its own requests up
to n before. After a gather everybody knows the same: whether there is work, and m, the lowest of the numbers
that the engines had heard of. If there is work, all go on to the next gather. If not, an engine goes on to it
when it has heard of a higher number than m, or has work, and sleeps in its inbox until then. Why no engine is
ever alone in a gather:

  - One that has heard of a number above m is not alone: the front end has sent that number to all, so all
    hear of it and go on.
  - One that has got work since the gather is not alone: the request's number is above all that this engine
    had heard of, so above m, and is on its way to all.
  - If none has heard of a number above m, nobody has work: all sleep, with nothing on its way but what wakes
    all.

An engine that is told to end says so in a gather, and all end after it: the front end tells all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum

from mtpserve.core.protocols.parallel import Peers


class State(IntEnum):
    """What an engine brings to a gather; the highest of all decides what they do next."""

    IDLE = 0
    WAITS = 1  # for something that is not computed in steps: a grammar
    WORKS = 2
    ENDS = 3


class Ticks:
    """`finish`: to be called at the end of each tick, returns when all have finished. Without peers: those of
    an engine by itself."""

    def __init__(self, peers: Peers | None = None, finish: Callable[[], None] = lambda: None) -> None:
        self.peers, self.finish = peers, finish
        self.heard = 0  # the highest number of a Join
        self.met = 0  # the lowest of these at the last gather
        self.state = State.IDLE  # the highest at the last gather

    @property
    def sleeps(self) -> bool:
        """Unless there is work meanwhile."""
        return self.state == State.IDLE and self.heard <= self.met

    def begin(self, state: State) -> State:
        """The highest state of all."""
        mine = [int(state), self.heard]
        reports = [mine] if self.peers is None else self.peers.gather(mine)
        self.state, self.met = State(max(state for state, _ in reports)), min(heard for _, heard in reports)
        return self.state
