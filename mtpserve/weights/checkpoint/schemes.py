"""What a config says of how weights are quantised. Which matrices are, and in what form, their tensors say:
see matrix_formats.py. So this is a check, which names what is not supported before anything is read, and the
two facts that tensors do not show."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mtpserve.core.arch.model import FP8_BLOCK

if TYPE_CHECKING:
    from mtpserve.weights.checkpoint.hf_config import HFConfig

log = logging.getLogger(__name__)
BLOCK = list(FP8_BLOCK)
NVFP4, NVFP4_PACKED = ("NVFP4", "W4A16_NVFP4"), "nvfp4-pack-quantized"
MODELOPT = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "MXFP8", *NVFP4)
PACKED_BITS = (4, 8)
# (type, bits) of compressed-tensors' weights → strategies
STRATEGIES: dict[tuple[str, int], tuple[str, ...]] = {
    ("float", 8): ("tensor", "channel", "group", "block"),
    ("float", 4): ("group", "tensor_group"),
    ("int", 8): ("tensor", "channel", "group"),
    ("int", 4): ("channel", "group"),
}
FORMATS = (
    "dense", "naive-quantized", "float-quantized", "int-quantized", "pack-quantized", "mxfp4-pack-quantized",
    "mxfp8-quantized",
    NVFP4_PACKED,
    "mixed-precision",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class QuantConfig:
    # GPTQ: how much less than the zeros its second number format stores: 1 in the first version, 0 in the
    # second
    below: int = 1
    act_order: bool = False  # GPTQ: columns may belong to groups out of order


def quant_config_of(section: HFConfig) -> QuantConfig:
    """`section` may be empty: a checkpoint without a config."""
    version = section.raw("checkpoint_format") or section.raw("format")
    return QuantConfig(0 if version == "gptq_v2" else 1, section.raw("desc_act") is True)


def check(section: HFConfig) -> None:
    """Raises UnsupportedModel for what is known to be something else, and logs what is left out."""
    method = section.get_str("quant_method", None)
    if method not in CHECKS:
        raise section.unsupported("quant_method", ", ".join(CHECKS))
    CHECKS[method](section)
    caches = section.raw("kv_cache_scheme") or section.raw("kv_cache_quant_algo")
    if caches:
        log.info(
            "%s: the checkpoint's KV cache scales are not used: --kv-cache-dtype sets the number "
            "format of the KV cache",
            section.path,
        )


def has_nvfp4(section: HFConfig) -> bool:
    """True if the config says that matrices are in NVFP4, all or some."""
    layers = section.section("quantized_layers")
    if any(part.raw("quant_algo") in NVFP4 for part in (section, *map(layers.section, layers.values))):
        return True
    return any(group.raw("format") == NVFP4_PACKED for group in (section, *_groups(section)))


def _fp8(section: HFConfig) -> None:
    if section.raw("weight_block_size") not in (BLOCK, None):
        raise section.unsupported("weight_block_size", f"{BLOCK}, or none for one scale per matrix or row")
    if section.get_str("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise section.unsupported("fmt", "e4m3")


def _compressed(section: HFConfig) -> None:
    for scheme in (section, *_groups(section)):
        if scheme.get_str("format", None) not in (None, *FORMATS):
            raise scheme.unsupported("format", ", ".join(FORMATS))
        weights = scheme.section("weights")
        if not weights.values:
            continue
        kind = weights.get_str("type", "int"), weights.get_int("num_bits", 8, at_least=1)
        if kind[0] not in {name for name, _ in STRATEGIES}:
            raise weights.unsupported("type", "int, float")
        if kind not in STRATEGIES:
            raise weights.unsupported("num_bits", ", ".join(f"{bits} ({name})" for name, bits in STRATEGIES))
        if weights.get_str("strategy", None) not in (None, *STRATEGIES[kind]):
            raise weights.unsupported("strategy", ", ".join(STRATEGIES[kind]))
        if weights.raw("strategy") == "block" and weights.raw("block_structure") not in (
            BLOCK,
            "128x128",
            None,
        ):
            raise weights.unsupported("block_structure", str(BLOCK))
    if section.section("sparsity_config").get_str("format", "dense") != "dense":
        raise section.section("sparsity_config").unsupported("format", "dense")
    if section.section("transform_config").values.get("config_groups"):
        raise section.unsupported("transform_config", "none: rotations of activations are not computed")


def _groups(section: HFConfig) -> Iterator[HFConfig]:
    groups = section.section("config_groups")
    for name in groups.values:
        yield groups.section(name)


def _modelopt(section: HFConfig) -> None:
    layers: Any = section.raw("quantized_layers")
    if section.raw("quant_algo") == "MIXED_PRECISION" and isinstance(layers, dict):
        for name in layers:
            _algorithm(section.section("quantized_layers").section(name))
    else:
        _algorithm(section)


def _algorithm(section: HFConfig) -> None:
    if section.get_str("quant_algo", None) not in MODELOPT:
        raise section.unsupported("quant_algo", ", ".join(MODELOPT))


def _awq(section: HFConfig) -> None:
    name = "bits" if section.has("bits") else "w_bit"
    if section.get_int(name, 4) != 4:
        raise section.unsupported(name, "4")
    if section.get_str("version", "gemm").lower() != "gemm":
        raise section.unsupported("version", "gemm")
    if not section.get_bool("zero_point", True):
        raise section.unsupported("zero_point", "true")


def _gptq(section: HFConfig) -> None:
    if section.get_int("bits", at_least=1) not in PACKED_BITS:
        raise section.unsupported("bits", ", ".join(map(str, PACKED_BITS)))
    version = "checkpoint_format" if section.has("checkpoint_format") else "format"
    if section.get_str(version, "gptq") not in ("gptq", "gptq_v2"):
        raise section.unsupported(version, "gptq, gptq_v2")


def _as_named(section: HFConfig) -> None:
    """Nothing in the config changes what the tensors mean."""


CHECKS: dict[str, Callable[[HFConfig], None]] = {
    "fp8": _fp8,
    "fbgemm_fp8": _as_named,
    "compressed-tensors": _compressed,
    "modelopt": _modelopt,
    "awq": _awq,
    "gptq": _gptq,
    "mxfp4": _as_named,
}
