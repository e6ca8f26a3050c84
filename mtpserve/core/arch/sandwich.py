"""Dimensions of layers whose blocks are normed before and after (layers/sandwich)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SandwichArch:
    """`tied_values`: in layers without a window the projection of keys gives the values, too.
    `wide_readers`: the feed-forward blocks of layers that store no keys are twice as wide.
    `token_dim`: numbers that each layer gets of a row's token by itself; 0: none. They come from a table of
    `token_vocab` tokens."""

    tied_values: bool = False
    wide_readers: bool = False
    token_dim: int = 0
    token_vocab: int = 0
