"""What a DFlash drafter's config.json says: as a Qwen3 model's, with a section for what is DFlash's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from mtpserve.core.arch.model import Attention, KVLayout, LayerKind, ModelArch
from mtpserve.heads.head import same
from mtpserve.models import gqa
from mtpserve.models.gqa import SLIDING, layer_types
from mtpserve.weights.checkpoint.hf_config import HFConfig

DFLASH, DFLASH2 = "DFlashDraftModel", "DFlash2DraftModel"
# Parts of the section that other drafters of this kind have, and the value with which there is none.
ELSEWHERE: dict[str, Any] = {"projector_type": None, "sample_from_anchor": False, "selector_type": None}


@dataclass(frozen=True, slots=True)
class Selector:
    rank: int
    best: int


@dataclass(frozen=True, slots=True)
class DFlashArch:
    model: ModelArch  # its own layers
    taps: tuple[int, ...]
    mask: int
    size: int  # rows of the blocks that it was trained on, with the last committed token
    causal: tuple[bool, ...]  # by layer: a block's rows see only those before them
    embedding_scale: float
    multiplier: float  # a factor of the logits, before `softcap` bounds them
    softcap: float | None
    convolution: tuple[int, int] | None  # taps, and numbers that share a kernel
    selector: Selector | None

    @property
    def plain_logits(self) -> bool:
        return self.multiplier == 1 and self.softcap is None and self.selector is None


def read_dflash(config: HFConfig, trunk: ModelArch) -> DFlashArch:
    """Raises LoadError, UnsupportedModel, or ConfigError where the drafter is not one for this trunk."""
    names, section = config.raw("architectures"), config.section("dflash_config")
    if config.has("speculators_model_type"):
        raise config.unsupported("speculators_model_type", "the layout of z-lab's checkpoints")
    if names not in ([DFLASH], [DFLASH2]):
        raise config.unsupported("architectures", f"{DFLASH}, {DFLASH2}")
    for name, without in ELSEWHERE.items():
        if section.has(name) and section.raw(name) != without:
            raise section.unsupported(name, "none")
    if (config.path.parent / "mask_embedding.pt").is_file():
        raise config.unsupported(
            "architectures", f"{DFLASH} whose mask is a token of the vocabulary, without a mask_embedding.pt"
        )
    same("hidden_size", config, config.get_int("hidden_size"), trunk.hidden)
    same("vocab_size", config, config.get_int("vocab_size"), trunk.vocab)
    same("draft_vocab_size", config, config.get_int("draft_vocab_size", trunk.vocab), trunk.vocab)
    same("num_target_layers", config, config.get_int("num_target_layers", trunk.num_layers), trunk.num_layers)
    layers = config.get_int("num_hidden_layers", at_least=1)
    two = names == [DFLASH2]
    where = either(config, section, "mask_token_id")
    mask = where.get_int("mask_token_id", at_least=0)
    where.require(mask < trunk.vocab, "mask_token_id", f"a token of the model, which has {trunk.vocab}")
    softcap = section.get_float("final_logit_softcapping", 0.0)
    return DFlashArch(
        model_of(config, section),
        taps(either(config, section, "target_layer_ids"), trunk.num_layers),
        mask,
        either(config, section, "block_size").get_int("block_size", 16, at_least=2),
        causal(config, section, layers),
        section.get_float("input_embedding_scale", 1.0),
        section.get_float("output_multiplier", 1.0),
        softcap if softcap > 0 else None,
        convolution(config, section) if two else None,
        Selector(section.get_int("selector_rank", at_least=1), section.get_int("selector_top_k", at_least=1))
        if two
        else None,
    )


def either(config: HFConfig, section: HFConfig, name: str) -> HFConfig:
    """Returns the config that has the key: older files have it at the top."""
    return config if config.has(name) and not section.has(name) else section


def taps(where: HFConfig, layers: int) -> tuple[int, ...]:
    ids = where.raw("target_layer_ids")
    good = isinstance(ids, list) and bool(ids) and all(type(i) is int and 0 <= i < layers for i in ids)
    where.require(good, "target_layer_ids", f"a list of the model's layers, 0 to {layers - 1}")
    return tuple(ids)


def convolution(config: HFConfig, section: HFConfig) -> tuple[int, int]:
    taps, group = (
        section.get_int("conv_kernel_size", at_least=1),
        section.get_int("conv_group_size", at_least=1),
    )
    section.require(config.get_int("hidden_size") % group == 0, "conv_group_size", "a divisor of hidden_size")
    return taps, group


def model_of(config: HFConfig, section: HFConfig) -> ModelArch:
    """Its end-of-text tokens are the model's, so that any will do here."""
    if not config.get_bool("is_neox_style", True):
        raise config.unsupported("is_neox_style", "true")

    def kinds(config: HFConfig, kv: KVLayout) -> Sequence[LayerKind]:
        heads, layer_windows = config.get_int("num_attention_heads"), windows(config, section)
        return [Attention(kv, window, heads=heads) for window in layer_windows]

    bias = config.get_bool("attention_bias", False)
    arch = gqa.arch(
        config.with_default("eos_token_id", 0),
        "dflash",
        positions=32768,
        qkv_bias=bias,
        out_bias=bias,
        head_norms=True,
        trunk=kinds,
    )
    sinks = section.get_bool("attention_sink_bias", False)
    return replace(
        arch, sinks="all" if sinks else None, value_scale=section.get_float("attention_value_scale", 1.0)
    )


def windows(config: HFConfig, section: HFConfig) -> list[int | None]:
    """Returns each layer's window or None: layers that `layer_types` names have one, or all with
    `use_swa`."""
    types, layers = layer_types(config), config.get_int("num_hidden_layers", at_least=1)
    every = section.get_bool("use_swa", False) and (types is None or SLIDING not in types)
    sliding = [every or (types is not None and types[i] == SLIDING) for i in range(layers)]
    if not any(sliding):
        return [None] * layers
    where, name = (
        (section, "swa_window_size") if section.has("swa_window_size") else (config, "sliding_window")
    )
    window = where.get_int(name, at_least=1)
    return [window if slides else None for slides in sliding]


def causal(config: HFConfig, section: HFConfig, layers: int) -> tuple[bool, ...]:
    """Returns for each layer whether a block's rows see only those before them. By default these are the
    layers that `layer_types` calls sliding."""
    is_causal = config.get_bool("is_causal", None)
    is_causal = section.get_bool("causal", None) if is_causal is None else is_causal
    types = layer_types(config)
    return tuple(
        is_causal if is_causal is not None else types is not None and types[i] == SLIDING
        for i in range(layers)
    )
