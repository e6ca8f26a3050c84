"""An engine's weights change between two steps, and with them all that was computed from them: no page is
found again, requests that run are computed again, and the policy learns again what is accepted."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from hashlib import blake2b

from safetensors.torch import save

from mtpserve.core.errors import EngineDead, InvalidRequest, LoadError
from mtpserve.core.protocols.control import (
    Calls,
    CommitWeights,
    OnEveryRank,
    Reply,
    SetWeightVersion,
    StageTensors,
    UpdateTensors,
    UpdateWeights,
)
from mtpserve.engine.engine import Engine
from mtpserve.engine.updates.rank_weights import RankWeights

log = logging.getLogger(__name__)
MOST_BYTES = 3 << 30  # a message to another rank has 4 GiB at most


class WeightUpdates:
    """Registers itself with the engine's controls. `weights`: of this process's rank. `on_every_rank` has all
    ranks take a call; None: this is the only one. `refusal`: why weights do not change, or ""."""

    def __init__(
        self,
        engine: Engine,
        weights: RankWeights,
        on_every_rank: Callable[[Calls], Reply] | None,
        refusal: str = "",
    ) -> None:
        self._engine, self._weights, self._refusal = engine, weights, refusal
        self.asleep = False  # its weights are released
        self._is_alone = on_every_rank is None
        self._on_every_rank = on_every_rank or engine.controls.take
        engine.controls.add(SetWeightVersion, self.set_version)
        engine.controls.add(UpdateWeights, self.update)
        engine.controls.add(UpdateTensors, self.update_tensors)
        engine.controls.add(OnEveryRank, lambda call: self._on_every_rank(call.call))

    def require_updates(self) -> None:
        """Raises InvalidRequest where weights cannot change, or not now."""
        if self._refusal:
            raise InvalidRequest(self._refusal)
        if self.asleep:
            raise InvalidRequest("the engine sleeps without its weights: wake up the tag weights first")
        _ = self._weights.weights

    def set_version(self, call: SetWeightVersion) -> Reply:
        """The name alone changes."""
        self._engine.weight_version = call.weight_version
        return Reply()

    def update(self, call: UpdateWeights) -> Reply:
        self.require_updates()
        return self._written(self._on_every_rank(call.stage), call.weight_version)

    def update_tensors(self, call: UpdateTensors) -> Reply:
        """Raises LoadError."""
        self.require_updates()
        if self._is_alone:
            staged = self._weights.stage_tensors(call.tensors)
        else:
            tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in call.tensors.items()}
            if sum(tensor.nbytes for tensor in tensors.values()) > MOST_BYTES:
                raise LoadError(f"{', '.join(tensors)}: other ranks take 3 GiB at once, and no more")
            staged = self._on_every_rank(StageTensors([save(tensors)]))
        return self._written(staged, call.weight_version)

    def _written(self, staged: Reply, weight_version: str | None) -> Reply:
        """Has all ranks write what they have staged, if all have."""
        if staged.error:
            self._on_every_rank(CommitWeights(write=False))
            return staged
        if (done := self._on_every_rank(CommitWeights(write=True))).error:
            raise EngineDead(f"only a part of the new weights was written: {done.error}")
        if staged.values["parameters"]:
            self._engine.renew(self._new_fingerprint())
        if weight_version is not None:
            self._engine.weight_version = weight_version
        log.debug("new weights: %d parameters, version %s", staged.values["parameters"], weight_version)
        return staged

    def _new_fingerprint(self) -> bytes | None:
        """One that no pages were ever computed with, in any tier: a version's name may come twice."""
        before = self._engine.fingerprint
        return None if before is None else blake2b(before + os.urandom(16), digest_size=16).digest()
