"""An engine sleeps: between two steps it gives memory back, keeps its requests waiting, and takes the memory
again when it wakes up."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence as Seq

from mtpserve.core.errors import EngineDead, InvalidRequest
from mtpserve.core.protocols.control import (
    MEMORY_TAGS,
    Calls,
    ReleaseMemory,
    Reply,
    ResumeMemory,
    Sleep,
    StageCheckpoint,
    UpdateWeights,
    WakeUp,
)
from mtpserve.engine.engine import Engine
from mtpserve.engine.updates.weight_updates import WeightUpdates

log = logging.getLogger(__name__)


class Sleeps:
    """Registers itself with the engine's controls. `on_every_rank` has all ranks take a call. `checkpoints`:
    what weights that were dropped are loaded from. `refusal`: why the engine does not sleep, or ""."""

    def __init__(
        self,
        engine: Engine,
        on_every_rank: Callable[[Calls], Reply],
        updates: WeightUpdates,
        checkpoints: Seq[StageCheckpoint],
        refusal: str = "",
    ) -> None:
        self._engine, self._on_every_rank, self._updates = engine, on_every_rank, updates
        self._checkpoints, self._refusal, self._version = checkpoints, refusal, engine.weight_version
        self._asleep: dict[str, bool] = {}  # what was released, and whether its contents were dropped
        engine.controls.add(Sleep, self.sleep)
        engine.controls.add(WakeUp, self.wake_up)

    def sleep(self, call: Sleep) -> Reply:
        """Raises InvalidRequest."""
        if self._refusal:
            raise InvalidRequest(self._refusal)
        tags = [tag for tag in checked(call.tags) if tag not in self._asleep]
        if not tags:
            return Reply(values={"bytes": 0})
        if call.drops_weights and "weights" in tags:
            self._updates.require_updates()
        if "kv_cache" in tags:
            self._engine.retract()
            self._engine.reset_prefix_cache()
        reply = self._on_every_rank(ReleaseMemory(tags, call.drops_weights))
        if reply.error:
            raise EngineDead(f"memory was released in a part of the ranks: {reply.error}")
        self._asleep |= {tag: tag == "weights" and call.drops_weights for tag in tags}
        self._note()
        log.info("the engine sleeps: %s, %.1f MiB given back", ", ".join(tags), reply.values["bytes"] / 2**20)
        return reply

    def wake_up(self, call: WakeUp) -> Reply:
        """Raises InvalidRequest."""
        tags = [tag for tag in checked(call.tags or MEMORY_TAGS) if tag in self._asleep]
        if not tags:
            return Reply()
        reply = self._on_every_rank(ResumeMemory(tags))
        if reply.error:
            raise EngineDead(f"memory was taken again in a part of the ranks: {reply.error}")
        dropped = [tag for tag in tags if self._asleep.pop(tag)]
        self._note()
        for checkpoint in self._checkpoints if dropped else ():
            if error := self._updates.update(UpdateWeights(checkpoint, self._version)).error:
                raise EngineDead(f"the weights cannot be loaded again: {error}")
        log.info("the engine has its memory again: %s", ", ".join(tags))
        return Reply()

    def _note(self) -> None:
        self._engine.stats.sleeping = int(bool(self._asleep))
        self._updates.asleep = "weights" in self._asleep


def checked(tags: Seq[str]) -> Seq[str]:
    """Raises InvalidRequest."""
    for tag in tags:
        if tag not in MEMORY_TAGS:
            raise InvalidRequest(f"tags: {tag!r:.100} must be one of {', '.join(MEMORY_TAGS)}", "tags")
    return tags
