"""What profiles of an engine's steps are asked for, and what became of them."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ProfileChange:
    """Begin a trace, or end the one that is being taken, where `folder` is empty."""

    folder: str = ""
    name: str = ""  # begins its files' names; engine and rank follow
    steps: int = 0  # after which it ends by itself
    cpu: bool = True
    gpu: bool = True
    memory: bool = False  # every tensor's
    stacks: bool = False  # record Python stacks of each operation
    shapes: bool = False  # record shapes of each operation's arguments


@dataclass(frozen=True, slots=True)
class ProfileReport:
    """`refused`: why nothing was done, or ""; `failed`: what could not be written, or ""."""

    refused: str = ""
    failed: str = ""
    files: list[str] = field(default_factory=list)  # that were written, when a trace ended
