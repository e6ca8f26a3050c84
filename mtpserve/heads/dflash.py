"""DFlash (https://arxiv.org/abs/2602.06036) and DFlash2 (github.com/z-lab/dflash): some layers propose a
block of tokens in one pass.

Each layer has only keys and values of committed tokens. They are made from the outputs of some of the trunk's
layers, joined by `fc` and normed. The block is the embeddings of the last token and of a mask for each draft.
Its rows see the context and each other, in causal layers only those before them, and a mask's output is the
draft at its place. Embedding and language-model head are the trunk's.

DFlash2 has two more parts. Convolutions over the block's rows before and after each attention and
feed-forward block mix a row with those before it (layers/mixers/block_convolution). And a selector rescores a
place's best candidates by the token before it: logit + <A[token before] * H(h), B[candidate]>. Other tokens
are not proposed.

A corrector on a block backbone fits as the selector does: the state that is handed from draft to draft is the
outputs for those that are left, `step` is told the token that was drafted, and `logits` joins both. So would
DSpark's logits of the token before and LiLiCorr's correction, whose own numbers, where it carries any from
draft to draft, are a part of that state.

In a window the rows of a block that is not causal see what its last one sees: of long texts the first of them
up to 7 tokens less than in training.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from mtpserve.config import EngineConfig
from mtpserve.core.arch.model import Attention, DraftArch, Features, LayerKind, ModelArch
from mtpserve.core.batch import Hidden
from mtpserve.core.errors import ConfigError
from mtpserve.core.protocols.attention import Context
from mtpserve.core.protocols.linear import LinearMethod
from mtpserve.heads.dflash_config import DFlashArch, Selector, read_dflash
from mtpserve.heads.head import Head, Separate, opened
from mtpserve.layers.decoder import DecoderModel, Methods, shared_head
from mtpserve.layers.embedding import Embedding
from mtpserve.layers.kernels import Kernels
from mtpserve.layers.linear import Linear
from mtpserve.layers.mixers.attention import GQA
from mtpserve.layers.mixers.block_convolution import BlockConvolution
from mtpserve.layers.mlp import MLP
from mtpserve.layers.norm import RMSNorm
from mtpserve.layers.rope import Rope, Rotation
from mtpserve.models.family import trunk_layers
from mtpserve.models.gqa import layer_names
from mtpserve.weights.checkpoint.hf import read_config
from mtpserve.weights.rules import Copy, Rule


class DFlashLayer(nn.Module):
    def __init__(self, arch: DFlashArch, kind: Attention, method: LinearMethod, kernels: Kernels) -> None:
        super().__init__()
        model_arch, hidden = arch.model, arch.model.hidden
        self.attention_norm, self.mlp_norm = (
            RMSNorm(hidden, model_arch.norm_eps, kernels),
            RMSNorm(hidden, model_arch.norm_eps, kernels),
        )
        self.attention = GQA(model_arch, kind, method, kernels)
        self.mlp = MLP(hidden, model_arch.intermediate, method, kernels)
        taps, group = arch.convolution or (0, 1)
        self.attention_conv = BlockConvolution(hidden, taps, group, method) if taps else None
        self.mlp_conv = BlockConvolution(hidden, taps, group, method) if taps else None

    def forward(
        self, x: Tensor, residual: Tensor | None, rotation: Rotation, context: Context, block: int
    ) -> tuple[Tensor, Tensor]:
        """x [T, hidden], rows of blocks of `block` → the output as two terms, as
        layers.decoder.DecoderLayer's."""
        x, residual = self.attention_norm.add(x, residual)
        if self.attention_conv is None or self.mlp_conv is None:
            x = self.attention(x, rotation, context)
            x, residual = self.mlp_norm.add(x, residual)
            return self.mlp(x), residual
        x, kernel = self.attention_conv.before(x, block)
        x = self.attention_conv.after(self.attention(x, rotation, context), kernel, block)
        x, residual = self.mlp_norm.add(x, residual)
        x, kernel = self.mlp_conv.before(x, block)
        return self.mlp_conv.after(self.mlp(x), kernel, block), residual


class CandidateSelector(nn.Module):
    """DFlash2's rescoring of the best `best` tokens of a place."""

    def __init__(self, selector: Selector, arch: ModelArch, method: LinearMethod) -> None:
        super().__init__()
        self.best = selector.best
        self.before, self.candidate = (
            Embedding(arch.vocab, selector.rank),
            Embedding(arch.vocab, selector.rank),
        )
        self.hidden = Linear(arch.hidden, (selector.rank,), method)

    def gate(self, ids: Tensor, hidden: Tensor) -> Tensor:
        """Tokens [n] and the outputs [n, hidden] of the places after them → [n, rank]"""
        gate: Tensor = self.before(ids) * self.hidden(hidden)
        return gate

    def logits(self, unary: Tensor, gate: Tensor) -> Tensor:
        """[n, vocabulary] → the same; -inf for all but the best."""
        best = unary.topk(min(self.best, unary.shape[-1]), -1)
        edges = torch.einsum("nr,nkr->nk", gate.float(), self.candidate(best.indices).float())
        return torch.full_like(unary, -torch.inf).scatter(-1, best.indices, best.values + edges)


class DFlashModel(nn.Module):
    """core.protocols.models.BlockModel. Embedding and head are the trunk's own objects, borrowed and not held
    as children."""

    lag, at_once, tokens = 1, True, None

    def __init__(
        self, arch: DFlashArch, trunk: DecoderModel, methods: Methods, dtype: torch.dtype, positions: int,
        kernels: Kernels
    ) -> None:  # fmt: skip
        super().__init__()
        model_arch, self.arch, self.borrowed, self.hidden = arch.model, arch, [trunk], arch.model.hidden
        self.mask, self.causal, self.features = arch.mask, arch.causal, Features(taps=arch.taps)
        self.layers: tuple[LayerKind, ...] = model_arch.layers
        self.fc = Linear(len(arch.taps) * model_arch.hidden, (model_arch.hidden,), methods.draft)
        self.hidden_norm = RMSNorm(model_arch.hidden, model_arch.norm_eps, kernels)
        self.norm = RMSNorm(model_arch.hidden, model_arch.norm_eps, kernels)
        self.blocks = nn.ModuleList(
            DFlashLayer(arch, model_arch.attention(i), methods.draft, kernels)
            for i in range(len(model_arch.layers))
        )
        self.rope = Rope(model_arch.rope, positions, dtype)
        self.trunk_head = shared_head(trunk, methods)
        self.selector = (
            None if arch.selector is None else CandidateSelector(arch.selector, model_arch, methods.draft)
        )

    def extend(
        self, ids: Tensor, positions: Tensor, features: Tensor | None, contexts: Sequence[Context]
    ) -> Hidden:
        """What is committed has keys and values. Nobody gets the output."""
        x, rotation = self.hidden_norm(self.fc(features)), self.rope(positions)
        for layer, context in zip(self.blocks, contexts, strict=True):
            cast(DFlashLayer, layer).attention.store(x, rotation, context)
        return Hidden(x, None)

    def store_kv(
        self, ids: Tensor, positions: Tensor, features: Tensor | None, contexts: Sequence[Context]
    ) -> None:
        self.extend(ids, positions, features, contexts)

    def block(self, ids: Tensor, positions: Tensor, contexts: Sequence[Context]) -> Hidden:
        x, residual = self.borrowed[0].embed(ids.flatten()), None
        x, rotation = (
            x if self.arch.embedding_scale == 1 else x * self.arch.embedding_scale,
            self.rope(positions.flatten()),
        )
        for layer, context in zip(self.blocks, contexts, strict=True):
            x, residual = layer(x, residual, rotation, context, ids.shape[1])
        out = self.norm.add(x, residual)[0].unflatten(0, ids.shape)
        # The first row is the last token's, whose successor the first mask stands for.
        return self.step(ids[:, 0], positions[:, 0], out[:, 1:].flatten(1), ())

    def step(
        self, ids: Tensor, positions: Tensor, state: Tensor | None, contexts: Sequence[Context]
    ) -> Hidden:
        assert state is not None
        head, carry = state[:, : self.hidden], state[:, self.hidden :]
        return Hidden(
            head if self.selector is None else torch.cat([head, self.selector.gate(ids, head)], -1), carry
        )

    def logits(self, head: Tensor, depth: int) -> Tensor:
        logits = self.trunk_head(head[:, : self.hidden])
        logits = logits if self.arch.multiplier == 1 else logits * self.arch.multiplier
        logits = (
            logits if self.arch.softcap is None else (logits / self.arch.softcap).tanh() * self.arch.softcap
        )
        return logits if self.selector is None else self.selector.logits(logits, head[:, self.hidden :])


class DFlash(Separate):
    """core.protocols.DraftSource."""

    def open(self, directory: Path, config: EngineConfig, trunk: ModelArch) -> Head:
        values, checkpoint, spec = read_config(directory), opened(directory, config), config.spec
        arch = read_dflash(values, trunk)
        if spec.steps >= arch.size:
            reason = f"{directory} drafts blocks of {arch.size} tokens, the last committed one included"
            raise ConfigError(
                f"--speculative-num-steps must be at most {arch.size - 1}, got {spec.steps}: {reason}"
            )
        if spec.speculative_token_map is not None and not arch.plain_logits:
            raise ConfigError(
                "--speculative-token-map needs a draft model whose logits are the head's, and this "
                "one changes them"
            )
        model_arch = arch.model
        kind = (
            f"{'DFlash' if arch.selector is None else 'DFlash2'} drafter ({len(model_arch.layers)} "
            f"layers, blocks of {arch.size})"
        )
        drafts = DraftArch(kind, model_arch.layers, Features(taps=arch.taps), scale=model_arch.scale)
        start = r"model\." if any(name.startswith("model.") for name in checkpoint.tensors) else ""
        return Head(checkpoint, drafts, rules_of(arch, start), partial(make, arch))


def rules_of(arch: DFlashArch, start: str) -> list[Rule]:
    """`start`: a pattern."""
    names = layer_names(arch.model)
    if arch.model.sinks is not None:
        names.append((r"self_attn\.attention_sink_bias", "attention.sinks", Copy()))
    if arch.convolution is not None:
        names += [
            (rf"{block}_conv\.{theirs}", f"{block}_conv.{ours}", Copy())
            for block in ("attention", "mlp")
            for theirs, ours in ((r"base_kernel", "base"), (r"kernel_projection\.weight", "kernel.weight"))
        ]
    layers = trunk_layers(arch.model, names, model=start)
    rules = [
        rule
        if rule.target is None
        else Rule(rule.pattern, rule.target.replace("layers.", "blocks.", 1), rule.how)
        for rule in layers
    ]
    rules += [Rule(rf"{start}{name}\.weight", f"{name}.weight") for name in ("fc", "hidden_norm", "norm")]
    if arch.selector is not None:
        parts = {
            "predecessor_codebook": "before",
            "successor_codebook": "candidate",
            "hidden_projection": "hidden",
        }
        rules += [
            Rule(rf"{start}candidate_selector\.{component}(?:\.weight)?", f"selector.{ours}.weight")
            for component, ours in parts.items()
        ]
    return rules


def make(
    arch: DFlashArch, trunk: DecoderModel, methods: Methods, dtype: torch.dtype, positions: int,
    kernels: Kernels
) -> DFlashModel:  # fmt: skip
    return DFlashModel(arch, trunk, methods, dtype, positions, kernels)


DFLASH = DFlash()
