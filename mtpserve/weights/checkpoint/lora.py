"""Reads an adapter as PEFT saves it: adapter_config.json and adapter_model.safetensors.

Each of its modules is a pair of matrices, A [r, inputs] and B [outputs, r], whose scaled product is added to
a matrix of the model. The model's own rules say which. What is not such a pair is refused by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from mtpserve.core.errors import LoadError
from mtpserve.weights.audit import all_finite
from mtpserve.weights.rules import Copy, Matcher, Rule, Stack

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
# What an adapter may have besides pairs, by the keys of its config; none of it is computed.
REFUSED = (
    "use_dora", "lora_bias", "modules_to_save", "trainable_token_indices", "alora_invocation_tokens",
    "target_parameters", "layer_replication", "use_qalora", "use_bdlora", "fan_in_fan_out",
)  # fmt: skip
PAIR = re.compile(rf"{re.escape(PREFIX)}(?P<module>.+)\.lora_(?P<letter>[AB])\.weight")


@dataclass(frozen=True, slots=True)
class AdapterPair:
    """What is added to one matrix: `b` is scaled."""

    module: str  # the checkpoint's name
    target: str  # the linear layer's name in the model
    part: int | None  # which of its fused matrices; None: the whole
    a: Tensor  # [r, inputs] float32
    b: Tensor  # [outputs, r] float32


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    pairs: list[AdapterPair]
    fingerprint: bytes  # of all numbers


def read_adapter(path: str, rules: Sequence[Rule], max_rank: int) -> AdapterFiles:
    """`rules`: of the model's own checkpoint. Raises LoadError."""
    directory = Path(path)
    config = read_config(directory)
    tensors = read_tensors(directory / TENSORS)
    sides: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        match = PAIR.fullmatch(name)
        if match is None:
            raise LoadError(
                f"{directory / TENSORS}: {name} is no lora_A or lora_B of a linear layer: it is not supported"
            )
        sides.setdefault(match["module"], {})[match["letter"]] = tensor
    if not sides:
        raise LoadError(f"{directory / TENSORS}: there are no adapters in it")
    matcher, hasher = Matcher(rules), blake2b(digest_size=16)
    pairs = []
    for module, pair in sorted(sides.items()):
        where = f"{directory}: {module}"
        if set(pair) != {"A", "B"}:
            raise LoadError(f"{where}: lora_{'B' if 'A' in pair else 'A'} is missing")
        pairs.append(pair_of(where, module, pair["A"], pair["B"], config, matcher))
        rank = len(pair["A"])
        if rank > max_rank:
            raise LoadError(f"{where} has rank {rank}, and --max-lora-rank is {max_rank}")
        for side in (pairs[-1].a, pairs[-1].b):
            hasher.update(repr((module, tuple(side.shape))).encode() + side.contiguous().numpy().tobytes())
    return AdapterFiles(pairs, hasher.digest())


def read_config(directory: Path) -> dict[str, Any]:
    file = directory / CONFIG
    try:
        config = json.loads(file.read_text())
    except OSError as error:
        raise LoadError(f"{file}: {error.strerror or error}") from None
    except ValueError as error:
        raise LoadError(f"{file} is no JSON: {error}") from None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else None
        raise LoadError(f"{file}: peft_type must be LORA, got {kind!r}")
    for key in REFUSED:
        if config.get(key):
            raise LoadError(f"{file}: {key} is not supported: leave it out, got {config[key]!r}")
    if config.get("bias", "none") != "none":
        raise LoadError(f"{file}: bias must be none, got {config['bias']!r}")
    for key, kinds in (("r", int), ("lora_alpha", int | float)):
        if type(config.get(key)) is bool or not isinstance(config.get(key), kinds) or config[key] <= 0:
            raise LoadError(f"{file}: {key} must be a number above 0, got {config.get(key)!r}")
    for key in ("rank_pattern", "alpha_pattern"):
        if not isinstance(config.get(key) or {}, dict):
            raise LoadError(f"{file}: {key} must be an object, got {config[key]!r}")
    return config


def read_tensors(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise LoadError(f"{file}: {error}") from None


def pair_of(
    where: str, module: str, a: Tensor, b: Tensor, config: dict[str, Any], matcher: Matcher
) -> AdapterPair:
    """Raises LoadError for a module that the model has not, and for numbers that do not fit the config."""
    rank = value_of(config, "r", "rank_pattern", module)
    alpha = value_of(config, "lora_alpha", "alpha_pattern", module)
    if a.dim() != 2 or b.dim() != 2 or a.shape[0] != rank or b.shape[1] != rank:
        raise LoadError(f"{where}: shapes {list(a.shape)} and {list(b.shape)} are not those of rank {rank}")
    scale = alpha / rank**0.5 if config.get("use_rslora") else alpha / rank
    a, b = a.float(), b.float() * scale
    if not (all_finite(a) and all_finite(b)):
        raise LoadError(f"{where} holds NaN or infinite numbers")
    try:
        rule, groups = matcher.match(f"{module}.weight")
    except LoadError:
        raise LoadError(f"{where}: the model has no such layer") from None
    if rule.target is None or not isinstance(rule.how, Copy | Stack):
        raise LoadError(f"{where}: this layer takes no adapter")
    target = rule.resolve(groups).removesuffix(".weight")
    return AdapterPair(module, target, rule.how.part if isinstance(rule.how, Stack) else None, a, b)


def value_of(config: dict[str, Any], key: str, pattern_key: str, module: str) -> Any:
    """The config's value, or that of the first pattern which is the end of the module's name, as in PEFT."""
    for pattern, value in (config.get(pattern_key) or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return config[key]
