"""config.json and generation_config.json as Hugging Face writes them, read with plain json: transformers takes seconds to import.

Not a schema: a family asks for the keys that it knows, and every complaint names file, key, the value found and what would do.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, overload

from mtpserve.core.arch import RopeArch, YarnArch
from mtpserve.core.errors import LoadError, UnsupportedModel

T = TypeVar("T")
DTYPES = ("bfloat16", "float16", "float32")
FP8_BLOCK = [128, 128]


REQUIRED = object()  # the default of a key that must be there; None is a default like any other


@dataclass(frozen=True, slots=True)
class HFConfig:
    """One JSON object. A key with null is as absent. `read` collects the keys that were asked for, a section's as "section.key"."""

    path: Path
    values: dict[str, Any]
    prefix: str = ""
    read: set[str] = field(default_factory=set)

    def has(self, name: str) -> bool:
        self.read.add(self.prefix + name)
        return self.values.get(name) is not None

    def unread(self) -> set[str]:
        """Keys of this object that nobody has asked for."""
        return {name for name in self.values if self.prefix + name not in self.read}

    @overload
    def get_int(self, name: str, *, at_least: int | None = None) -> int: ...
    @overload
    def get_int(self, name: str, default: T, *, at_least: int | None = None) -> int | T: ...
    def get_int(self, name: str, default: object = REQUIRED, *, at_least: int | None = None) -> object:
        wanted = "an integer" if at_least is None else f"an integer of at least {at_least}"
        return self._get(name, default, wanted, lambda v: type(v) is int and (at_least is None or v >= at_least))

    @overload
    def get_float(self, name: str, *, above: float | None = None) -> float: ...
    @overload
    def get_float(self, name: str, default: T, *, above: float | None = None) -> float | T: ...
    def get_float(self, name: str, default: object = REQUIRED, *, above: float | None = None) -> object:
        wanted = "a number" if above is None else f"a number above {above:g}"
        low = -math.inf if above is None else above
        # Python's json reads NaN and Infinity; both fail the comparison.
        value = self._get(name, default, wanted, lambda v: type(v) in (int, float) and low < v < math.inf)
        return float(value) if type(value) is int else value

    @overload
    def get_str(self, name: str, *, one_of: tuple[str, ...] | None = None) -> str: ...
    @overload
    def get_str(self, name: str, default: T, *, one_of: tuple[str, ...] | None = None) -> str | T: ...
    def get_str(self, name: str, default: object = REQUIRED, *, one_of: tuple[str, ...] | None = None) -> object:
        wanted = "a string" if one_of is None else f"one of {', '.join(one_of)}"
        return self._get(name, default, wanted, lambda v: type(v) is str and (one_of is None or v in one_of))

    @overload
    def get_bool(self, name: str) -> bool: ...
    @overload
    def get_bool(self, name: str, default: T) -> bool | T: ...
    def get_bool(self, name: str, default: object = REQUIRED) -> object:
        return self._get(name, default, "true or false", lambda v: type(v) is bool)

    def section(self, name: str) -> HFConfig:
        """The nested object of that name; an empty one where there is none."""
        value = self._get(name, {}, "an object", lambda v: type(v) is dict)
        return HFConfig(self.path, value, f"{self.prefix}{name}.", self.read)

    def raw(self, name: str) -> Any:
        """The value as it is, None where there is none."""
        return self._get(name, None, "anything", lambda v: True)

    def require(self, good: bool, name: str, wanted: str) -> None:
        """Raise LoadError about key `name` unless `good`; families check with it what depends on several keys."""
        if not good:
            raise LoadError(f"{self.path}: {self.prefix}{name} must be {wanted}, got {json.dumps(self.values.get(name))}")

    def unsupported(self, name: str, supported: str) -> UnsupportedModel:
        """The error for a value that is legal and not implemented."""
        found = json.dumps(self.values.get(name))
        return UnsupportedModel(f"{self.path}: {self.prefix}{name} = {found} is not supported; supported: {supported}")

    def _get(self, name: str, default: object, wanted: str, good: Callable[[Any], bool]) -> Any:
        if self.has(name):
            self.require(good(self.values[name]), name, wanted)
            return self.values[name]
        if default is REQUIRED:
            raise LoadError(f"{self.path}: {self.prefix}{name} is missing; it must be {wanted}")
        return default


def read_config(directory: str | Path) -> HFConfig:
    directory = Path(directory)
    if not directory.is_dir():
        raise LoadError(f"{directory}: no such directory; a checkpoint is a directory with config.json and *.safetensors")
    path = directory / "config.json"
    if not path.is_file():
        raise LoadError(f"{directory}: no config.json in this directory")
    return _read_object(path)


def _read_object(path: Path) -> HFConfig:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise LoadError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise LoadError(f"{path}: is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise LoadError(f"{path}: must hold a JSON object, got {type(values).__name__}")
    return HFConfig(path, values)


def dtype(config: HFConfig) -> str:
    """The checkpoint's own: `dtype`, in older files `torch_dtype`; float32 where neither is there, as transformers has it."""
    name = "dtype" if config.has("dtype") else "torch_dtype"
    found = config.get_str(name, "float32").removeprefix("torch.")
    config.require(found in DTYPES, name, f"one of {', '.join(DTYPES)}")
    return found


def eos_ids(config: HFConfig, vocab: int) -> tuple[int, ...]:
    """The ids that end a text, below `vocab`: generation_config.json's, else config.json's. An id or a list; none at all is an error."""
    beside = config.path.parent / "generation_config.json"
    for source in [_read_object(beside)] if beside.is_file() else []:
        if source.has("eos_token_id"):
            return _ids(source, vocab)
    if not config.has("eos_token_id"):
        raise LoadError(f"{config.path}: eos_token_id is missing here and in generation_config.json, it must be an id or a list of ids")
    return _ids(config, vocab)


def _ids(config: HFConfig, vocab: int) -> tuple[int, ...]:
    value = config.raw("eos_token_id")
    ids = value if isinstance(value, list) else [value]
    good = bool(ids) and all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < vocab for i in ids)
    config.require(good, "eos_token_id", f"a token id or a list of token ids, in [0, {vocab - 1}]")
    return tuple(dict.fromkeys(ids))


def quantization(config: HFConfig) -> Literal["none", "fp8"]:
    """What the weights may be stored as. Whether one really is follows from its scale tensor, not from here."""
    if not config.has("quantization_config"):
        return "none"
    found = config.section("quantization_config")
    if found.get_str("quant_method", None) != "fp8":
        raise found.unsupported("quant_method", "none, and fp8 with blocks of [128, 128]")
    if found.raw("weight_block_size") != FP8_BLOCK:
        raise found.unsupported("weight_block_size", "[128, 128]")
    if found.get_str("fmt", "e4m3") != "e4m3":
        raise found.unsupported("fmt", "e4m3")
    return "fp8"


def rope(config: HFConfig, dim: int, interleaved: bool) -> RopeArch:
    """From `rope_parameters`, or from `rope_theta` and `rope_scaling` of older files: none, default, or yarn.

    `dim` and `interleaved` are the family's to know: they have a key in some configs and in most none.
    """
    name = "rope_parameters" if config.has("rope_parameters") else "rope_scaling"
    found = config.section(name)
    if any(isinstance(value, dict) for value in found.values.values()):
        raise config.unsupported(name, "one set of numbers for all layers")
    theta = found.get_float("rope_theta", None, above=0)
    if theta is None:
        theta = config.get_float("rope_theta", 10000.0, above=0)
    kind_key = "rope_type" if found.has("rope_type") else "type"
    kind = found.get_str(kind_key, "default")
    if kind not in ("default", "none", "yarn"):
        raise found.unsupported(kind_key, "default and yarn")
    return RopeArch(dim, theta, interleaved, _yarn(config, found) if kind == "yarn" else None)


def _yarn(config: HFConfig, found: HFConfig) -> YarnArch:
    factor = found.get_float("factor", above=0)
    mscale, all_dim = found.get_float("mscale", 1.0), found.get_float("mscale_all_dim", 0.0)
    gain = found.get_float("attention_factor", None, above=0)
    if not found.get_bool("truncate", True):
        raise found.unsupported("truncate", "true")
    if gain is not None:
        # The gain itself instead of the mscale that it is computed from: gain = 0.1 mscale ln(factor) + 1.
        if all_dim or factor <= 1:
            raise found.unsupported("attention_factor", "none beside mscale_all_dim, or with a factor of 1 or less")
        mscale = (gain - 1) / (0.1 * math.log(factor))
    length = found.get_int("original_max_position_embeddings", None, at_least=1)
    return YarnArch(
        factor=factor,
        original_length=config.get_int("max_position_embeddings", at_least=1) if length is None else length,
        beta_fast=found.get_float("beta_fast", 32.0, above=0),
        beta_slow=found.get_float("beta_slow", 1.0, above=0),
        mscale=mscale,
        mscale_all_dim=all_dim,
    )
