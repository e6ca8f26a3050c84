"""The model that heads are trained for: its layers' outputs and logits over whole texts, from mtpserve's own layers in plain torch.

So every family that mtpserve knows can have heads, also from a GGUF file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mtpserve.config import EngineConfig, ModelConfig
from mtpserve.core.arch.model import Attention, Features
from mtpserve.core.errors import UnsupportedModel
from mtpserve.engine.startup.planning import describe, load_model
from mtpserve.engine.startup.storage import Storage
from mtpserve.layers.devices.torch_kernels import torch_kernels
from mtpserve.text.tokenizer import Tokenizer
from mtpserve.weights.checkpoint.hub import fetched


class WholeTexts:
    """core.protocols.Context: texts of one length, side by side, each of which sees itself."""

    def __init__(self, kind: Attention, texts: int, length: int, scale: float, dtype: torch.dtype) -> None:
        self.kind, self.texts, self.scale = kind, texts, scale
        self.slots = torch.arange(texts * length)
        self.keys = torch.empty(texts * length, kind.kv.heads, kind.kv.key_dim, dtype=dtype)
        stored = self.keys[..., : kind.kv.value_dim]  # the latent layout's values are a part of its keys
        self.values = stored if kind.kv.kind == "mla" else torch.empty_like(stored)

    def attend(self, q: Tensor, sinks: Tensor | None = None) -> Tensor:
        q, k, v = (each.unflatten(0, (self.texts, -1)).transpose(1, 2) for each in (q, self.keys, self.values))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=True)
        return seen.transpose(1, 2).flatten(0, 1)


@dataclass(frozen=True, slots=True)
class Seen:
    """Texts, and what the trunk makes of them."""

    ids: Tensor  # [texts, length]
    taps: Tensor  # [texts, length, taps * hidden], outputs of three layers
    last: Tensor  # [texts, length, hidden], after the final norm
    chances: Tensor  # [texts, length, vocabulary of the drafts], of the next token


class Trunk:
    def __init__(self, model: str, length: int, dtype: torch.dtype) -> None:
        """`length`: of the texts at most."""
        config = fetched(EngineConfig(model=ModelConfig(model=model)))
        described = describe(config, want_mtp=False)
        self.arch, self.dtype, self.directory = described.arch, dtype, config.model.tokenizer_directory
        if not all(isinstance(kind, Attention) and kind.window is None and kind.selected is None for kind in self.arch.layers):
            raise UnsupportedModel(f"{model}: heads are trained for models whose layers all attend to the whole text")
        kept = Storage(keep_blocks=False, cache=dtype)
        self.model = load_model(described, dtype, torch.device("cpu"), length, torch_kernels(), False, kept)
        self.tokenizer = Tokenizer(self.directory)
        layers = self.arch.num_layers
        self.taps = (1, layers // 2, layers - 1)

    def rows(self, ids: Tensor) -> Tensor:
        """[...] → [..., hidden], the embeddings of these tokens."""
        return self.model.embed(ids.flatten()).float().unflatten(0, ids.shape)

    def head_of(self, tokens: Tensor) -> Tensor:
        """[n] → the language-model head's rows [n, hidden]"""
        return self.model.head.rows(tokens).float()

    @torch.no_grad()
    def see(self, ids: Tensor, head: Tensor, temperature: float) -> Seen:
        """ids [texts, length], head [n, hidden]: the rows of the tokens that are drafted."""
        texts, length = ids.shape
        kinds: Sequence[Attention] = self.arch.layers  # type: ignore[assignment]
        contexts = [WholeTexts(kind, texts, length, self.arch.scale, self.dtype) for kind in kinds]
        positions = torch.arange(length).repeat(texts)
        out = self.model.trunk(ids.flatten(), positions, contexts, Features(self.taps, "post"))
        assert out.features is not None
        rows = out.features.float().unflatten(0, (texts, length))
        taps, last = rows.split([len(self.taps) * self.arch.hidden, self.arch.hidden], -1)
        return Seen(ids, taps, last, (last @ head.mT / temperature).softmax(-1))
