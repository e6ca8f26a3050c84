"""Which weights an output's tokens are of, where weights change while it grows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class VersionSpan(NamedTuple):
    """The output tokens from `start` up to `end` were chosen under these weights."""

    version: str
    start: int
    end: int


@dataclass(slots=True)
class WeightVersions:
    """`switches`: the versions, with the number of output tokens before each."""

    switches: list[tuple[str, int]] = field(default_factory=list)

    def add(self, version: str, num_output_tokens: int) -> None:
        """`version`: of TokenEvent; "": it has not changed. `num_output_tokens`: before the event's own."""
        if version and (not self.switches or self.switches[-1][0] != version):
            self.switches.append((version, num_output_tokens))

    def spans(self, num_output_tokens: int) -> list[VersionSpan]:
        """Returns them in order, without empty ones."""
        ends = [start for _, start in self.switches[1:]] + [num_output_tokens]
        spans = (VersionSpan(*switch, end) for switch, end in zip(self.switches, ends, strict=False))
        return [span for span in spans if span.start < span.end]
