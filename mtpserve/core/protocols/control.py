"""What operators have an engine do between two steps, with none in flight: a call, which every engine and
each of its ranks takes, and its reply."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from mtpserve.core.errors import InvalidRequest, MTPServeError, RequestFailed


class Call(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of all: an array whose first element is the class's name. Who does what with which is registered
    with the process's Controls (engine/process/controls.py)."""


class SetWeightVersion(Call, frozen=True):
    weight_version: str


class Reply(msgspec.Struct, frozen=True, array_like=True):
    """`error` is "" where the call was done. Otherwise nothing was done; "invalid": the caller's fault, in
    the field `param`."""

    error: str = ""
    kind: Literal["invalid", "failed"] = "invalid"
    param: str | None = None
    values: dict[str, Any] = {}  # numbers, texts and lists of them, by name

    def check(self) -> Reply:
        """Raises InvalidRequest or RequestFailed for a call that was not done."""
        if not self.error:
            return self
        error: MTPServeError = (
            InvalidRequest(self.error, self.param) if self.kind == "invalid" else RequestFailed(self.error)
        )
        raise error


Calls = SetWeightVersion  # a union of all calls, for the decoders of messages
