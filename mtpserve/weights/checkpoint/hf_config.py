"""A config.json, whose keys are checked when a model family reads them.

Every error names the file, the key, its value and what is accepted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from mtpserve.core.errors import LoadError, UnsupportedModel

T = TypeVar("T")
REQUIRED: Any = object()  # the default of a key that must be present; None is a default like any other
# Names of one key: families and versions of transformers differ in which one they write.
SAME = (
    ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    ("num_experts_per_tok", "moe_k", "moe_top_k", "moe_topk"),
    ("moe_intermediate_size", "expert_ffn_hidden_size"),
)
OTHER_NAMES = {name: tuple(other for other in names if other != name) for names in SAME for name in names}


@dataclass(frozen=True, slots=True)
class HFConfig:
    """One JSON object of the file `path`; `prefix` is "section." for a nested one. A key whose value is null
    counts as absent. A key may have another of its names (SAME)."""

    path: Path
    values: dict[str, Any]
    prefix: str = ""

    def has(self, name: str) -> bool:
        return self.values.get(self.key(name)) is not None

    def key(self, name: str) -> str:
        """Returns the one of a key's names that has a value; `name` if none or several have."""
        names = (name, *OTHER_NAMES.get(name, ()))
        return next((key for key in names if self.values.get(key) is not None), name)

    def get_int(self, name: str, default: T = REQUIRED, *, at_least: int | None = None) -> int | T:
        wanted = "an integer" if at_least is None else f"an integer of at least {at_least}"
        return self._get(
            name, default, wanted, lambda v: type(v) is int and (at_least is None or v >= at_least)
        )

    def get_float(self, name: str, default: T = REQUIRED, *, above: float | None = None) -> float | T:
        wanted = "a number" if above is None else f"a number above {above:g}"
        low = -math.inf if above is None else above
        # Python's json reads NaN and Infinity; both fail the comparison.
        value = self._get(name, default, wanted, lambda v: type(v) in (int, float) and low < v < math.inf)
        return float(value) if type(value) is int else value

    def get_str(self, name: str, default: T = REQUIRED, *, one_of: tuple[str, ...] | None = None) -> str | T:
        wanted = "a string" if one_of is None else f"one of {', '.join(one_of)}"
        return self._get(name, default, wanted, lambda v: type(v) is str and (one_of is None or v in one_of))

    def get_bool(self, name: str, default: T = REQUIRED) -> bool | T:
        return self._get(name, default, "true or false", lambda v: type(v) is bool)

    def with_default(self, name: str, value: Any) -> HFConfig:
        """Returns the config with this value if the key is absent."""
        return self if self.has(name) else HFConfig(self.path, self.values | {name: value}, self.prefix)

    def section(self, name: str) -> HFConfig:
        """The nested object of that name; an empty one if there is none."""
        values: dict[str, Any] = self._get(name, {}, "an object", lambda v: type(v) is dict)
        return HFConfig(self.path, values, f"{self.prefix}{name}.")

    def raw(self, name: str) -> Any:
        """The value, unchecked; None if there is none."""
        return self._get(name, None, "anything", lambda v: True)

    def require(self, good: bool, name: str, wanted: str) -> None:
        """Raises LoadError about key `name` unless `good`; for checks that depend on several keys."""
        if not good:
            name = self.key(name)
            raise LoadError(
                f"{self.path}: {self.prefix}{name} must be {wanted}, got {json.dumps(self.values.get(name))}"
            )

    def unsupported(self, name: str, supported: str) -> UnsupportedModel:
        """The error for a valid value that is not implemented."""
        name = self.key(name)
        value = json.dumps(self.values.get(name))
        return UnsupportedModel(
            f"{self.path}: {self.prefix}{name} = {value} is not supported; supported: {supported}"
        )

    def _get(self, name: str, default: T, wanted: str, good: Callable[[Any], bool]) -> T | Any:
        if self.has(name):
            value = self.values[self.key(name)]
            self.require(good(value), name, wanted)
            return value
        if default is REQUIRED:
            raise LoadError(f"{self.path}: {self.prefix}{name} is missing; it must be {wanted}")
        return default
