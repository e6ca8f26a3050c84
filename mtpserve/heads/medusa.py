"""Medusa heads (https://arxiv.org/abs/2401.10774 §2.1): head i proposes the token i + 2 after the one whose
hidden state it gets, by some residual blocks x + silu(W x + b) and a language-model head of its own. No head
sees another one's proposal, so that the tree drafter's scores are products of marginals, and a chain's q is
each head's own.

Checkpoints as the authors publish them, and as vLLM converts them; the latter's heads may have the tokens of
a `token_map` alone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtpserve.config import EngineConfig
from mtpserve.core.arch.model import DraftArch, Features, LayerKind, ModelArch
from mtpserve.core.batch import Hidden
from mtpserve.core.errors import ConfigError
from mtpserve.core.protocols.attention import Context
from mtpserve.heads.head import Head, Separate, opened, same
from mtpserve.layers.decoder import DecoderModel, Methods, shared_head
from mtpserve.layers.kernels import Kernels
from mtpserve.layers.linear import Linear
from mtpserve.weights.checkpoint.hf import read_config
from mtpserve.weights.checkpoint.hf_config import HFConfig
from mtpserve.weights.rules import Drop, Rule


@dataclass(frozen=True, slots=True)
class MedusaArch:
    heads: int  # heads that are used
    layers: int  # residual blocks of a head
    bias: bool
    lm_heads: int  # one for each, one for all, or 0 where they share the model's
    tokens: int  # that they know
    mapped: bool  # these are a part of the vocabulary


class MedusaHeads(nn.Module):
    """core.protocols.models.DraftModel. It stores nothing of a text: all heads get the last hidden state."""

    lag, at_once, mask, features = 1, True, None, Features(last="post")
    layers: tuple[LayerKind, ...] = ()

    def __init__(self, arch: MedusaArch, trunk: DecoderModel, methods: Methods) -> None:
        super().__init__()
        hidden = trunk.arch.hidden
        self.blocks = nn.ModuleList(
            nn.ModuleList(
                Linear(hidden, (hidden,), methods.draft, bias=arch.bias) for _ in range(arch.layers)
            )
            for _ in range(arch.heads)
        )
        self.heads = nn.ModuleList(
            Linear(hidden, (arch.tokens,), methods.draft_head or methods.head) for _ in range(arch.lm_heads)
        )
        self.trunk_head = None if arch.lm_heads else shared_head(trunk, methods)
        self.token_map: Tensor | None
        self.register_buffer(
            "token_map", torch.empty(arch.tokens, dtype=torch.int64) if arch.mapped else None
        )

    @property
    def tokens(self) -> Tensor | None:
        return None if self.token_map is None else self.token_map.sort().values

    def extend(
        self, ids: Tensor, positions: Tensor, features: Tensor | None, contexts: Sequence[Context]
    ) -> Hidden:
        assert features is not None
        return Hidden(features, features)

    def store_kv(
        self, ids: Tensor, positions: Tensor, features: Tensor | None, contexts: Sequence[Context]
    ) -> None:
        """Later rows need nothing of these."""

    def step(
        self, ids: Tensor, positions: Tensor, state: Tensor | None, contexts: Sequence[Context]
    ) -> Hidden:
        assert state is not None
        return Hidden(state, state)

    def logits(self, head: Tensor, depth: int) -> Tensor:
        x = head
        for block in cast(nn.ModuleList, self.blocks[depth]):
            x = x + F.silu(block(x))
        if self.trunk_head is not None:
            return self.trunk_head(x)
        logits: Tensor = self.heads[min(depth, len(self.heads) - 1)](x, torch.float32)
        return logits if self.token_map is None else logits[:, self.token_map.argsort()]


class Medusa(Separate):
    """core.protocols.DraftSource."""

    def open(self, directory: Path, config: EngineConfig, trunk: ModelArch) -> Head:
        values, checkpoint, steps = read_config(directory), opened(directory, config), config.spec.steps
        names, (heads, layers) = list(checkpoint.tensors), numbers(values)
        if steps > heads:
            raise ConfigError(
                f"--speculative-num-steps must be at most {heads}, got {steps}: {directory} has "
                f"{heads} Medusa heads"
            )
        for key, value in (("hidden_size", trunk.hidden), ("vocab_size", trunk.vocab)):
            same(key, values, values.get_int(key, value), value)
        if values.get_float("logit_scale", 1.0) != 1:
            raise values.unsupported("logit_scale", "1")
        num_heads, one = max(steps, 1), values.get_bool("original_lm_head", False)
        theirs = [name for name in names if re.search(rf"lm_heads?\.|(?:^|\.)\d+\.{layers}\.weight", name)]
        # Each has a head of its own if there are no tensors.
        num_lm_heads = (1 if one else num_heads) if theirs or not names else 0
        if config.spec.speculative_token_map is not None:
            raise ConfigError(
                "--speculative-token-map needs a draft model that multiplies the head alone, which "
                "Medusa heads do not"
            )
        # vLLM leaves out a head's rows for other tokens while it loads. Here such a head keeps all.
        rows = (
            checkpoint.tensors[theirs[0]].shape[0]
            if theirs
            else values.get_int("truncated_vocab_size", trunk.vocab, at_least=1)
        )
        tokens = min(rows, trunk.vocab)
        arch = MedusaArch(
            num_heads,
            layers,
            any(name.endswith(".bias") for name in names),
            num_lm_heads,
            tokens,
            tokens < trunk.vocab,
        )
        kind = f"{heads} Medusa heads of {layers} residual block{'s' * (layers > 1)}"
        drafts = DraftArch(kind, (), MedusaHeads.features, own_head=num_lm_heads > 0)
        return Head(checkpoint, drafts, rules_of(arch, names), partial(make, arch))


def numbers(config: HFConfig) -> tuple[int, int]:
    """Returns the number of heads, and of residual blocks in each: by the authors' keys, or by vLLM's."""
    ours = config.has("medusa_num_heads")
    heads = config.get_int("medusa_num_heads" if ours else "num_heads", at_least=1)
    return heads, config.get_int("medusa_num_layers" if ours else "num_hidden_layers", 1, at_least=1)


def rules_of(arch: MedusaArch, names: list[str]) -> list[Rule]:
    """Returns the rules of the tensors `names`. They drop heads after the used ones."""
    start = re.escape(next((match[0] for name in names if (match := re.match(r"medusa_heads?\.", name))), ""))

    def some(count: int) -> tuple[str, str]:
        numbers = "|".join(map(str, range(count)))
        return rf"(?P<head>{numbers})", rf"(?!(?:{numbers})\.)\d+"

    (used_heads, unused), (lm_head, shared) = some(arch.heads), some(max(arch.lm_heads, 1))
    deeper = Drop("a head that is not used")
    if any(re.match(start + r"\d+\.", name) for name in names):
        rules = [
            Rule(
                rf"{start}{used_heads}\.(?P<layer>\d+)\.linear\.(?P<part>weight|bias)",
                "blocks.{head}.{layer}.{part}",
            ),
            Rule(rf"{start}{unused}\..+", None, deeper),
        ]
        return rules + (
            [Rule(rf"{start}{lm_head}\.{arch.layers}\.weight", "heads.{head}.weight")]
            if arch.lm_heads
            else []
        )
    return [
        Rule(
            rf"{start}blocks\.{used_heads}\.layers\.(?P<layer>\d+)\.(?P<part>weight|bias)",
            "blocks.{head}.{layer}.{part}",
        ),
        Rule(rf"{start}blocks\.{unused}\..+", None, deeper),
        Rule(rf"{start}lm_heads\.{lm_head}\.weight", "heads.{head}.weight"),
        Rule(rf"{start}lm_heads\.{shared}\..+", None, deeper),
        Rule(rf"{start}lm_head\.weight", "heads.0.weight"),
        Rule(rf"{start}token_map", "token_map")
        if arch.mapped
        else Rule(rf"{start}token_map", None, Drop("of all tokens")),
    ]


def make(
    arch: MedusaArch,
    trunk: DecoderModel,
    methods: Methods,
    dtype: torch.dtype,
    positions: int,
    kernels: Kernels,
) -> MedusaHeads:
    return MedusaHeads(arch, trunk, methods)


MEDUSA = Medusa()
