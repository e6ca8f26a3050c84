"""Dimensions of attention whose keys and values are one latent row: read by the family files, used by
layers/mixers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MLAArch:
    """Multi-head latent attention (DeepSeek-V2, https://arxiv.org/abs/2405.04434 §2.1)."""

    q_rank: int | None
    kv_rank: int
    nope: int
    rope: int
    value: int
    latent_scale: float = 1.0  # the normed latent is multiplied with it


@dataclass(frozen=True, slots=True)
class SharedKVArch:
    """Attention in which one latent row is the key and the value of all heads (DeepSeek-V4). The output
    projection is one in two: heads in `groups`, each of which is brought to `out_rank` numbers."""

    q_rank: int
    groups: int
    out_rank: int


@dataclass(frozen=True, slots=True)
class IndexerArch:
    """What scores the tokens of `Selected`: query heads of the index keys' size. Of both as many numbers are
    rotated as the attention rotates, the first ones, `interleaved` or in halves."""

    heads: int
    interleaved: bool
