"""The mutations: small changes to the product, each of which brings a bug in. One TOML file for each room, in `rooms/`.

tests = ["tests/engine/test_scheduler.py"]      arguments of pytest for the room's mutations

[[mutation]]
name = "stop_token_dropped"                     unique
file = "mtpserve/engine/stopping.py"
old = '''tokens[:count], Finish.STOP'''         occurs exactly once in the file
new = '''tokens[: count - 1], Finish.STOP'''
bug = "The stop token is missing in usage."     what a user sees
changelog = "…"                                 optional: words of CHANGELOG.md that tell of this bug
tests = ["…"]                                   optional: instead of the room's
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROOMS = Path(__file__).parent / "rooms"


class MutationError(Exception):
    """The patch does not fit the file."""


@dataclass(frozen=True, slots=True)
class Mutation:
    room: str
    name: str
    file: str  # relative to the repository
    old: str
    new: str
    bug: str
    tests: tuple[str, ...]  # arguments of pytest
    changelog: str = ""

    def applied(self, text: str) -> str:
        """Raises MutationError."""
        if (count := text.count(self.old)) != 1:
            raise MutationError(f"{self.name}: the old text occurs {count} times in {self.file}")
        return text.replace(self.old, self.new)


def read_room(path: Path) -> list[Mutation]:
    room = tomllib.loads(path.read_text(encoding="utf-8"))
    entries = ({"tests": room["tests"]} | entry for entry in room["mutation"])
    return [Mutation(path.stem, **entry | {"tests": tuple(entry["tests"])}) for entry in entries]


def mutations() -> list[Mutation]:
    return [mutation for path in sorted(ROOMS.glob("*.toml")) for mutation in read_room(path)]
