"""Draft models as they are trained: with autograd, over whole texts, without a cache.

Their parameters have the names of published checkpoints, so that saving is `state_dict()`. Serving does not use this file: mtpserve/heads
loads what was saved. Position p of a text has the trunk's features of token p; whoever drafts after it knows token p + 1 as well, and its
draft number d (from 0) stands for token p + 2 + d, of which the trunk's own distribution is in row p + 1 + d of Seen.chances.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from trunk import Seen, Trunk

DEPTHS = 3  # recurrent drafters are trained on their own output so often, and Medusa has as many heads
BLOCK, BLOCK_LAYERS = 8, 2  # DFlash's: the last token and the masks after it
LAYERS = 4  # of the model of its own

Drafted = Iterator[tuple[Tensor, Tensor]]  # of each draft: logits, and the trunk's distribution, both [..., vocabulary of the drafts]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of the layers of a drafter."""

    heads: int = 4
    kv_heads: int = 2
    dim: int = 64  # of a head
    inner: int = 512  # of the MLP


@dataclass(frozen=True, slots=True)
class Given:
    """What drafters are made of, besides the recipe."""

    trunk: Trunk
    tokens: Tensor  # [n] ascending: the vocabulary of the drafts
    head: Tensor  # [n, hidden], these tokens' rows of the trunk's language-model head
    mask: int  # the token that stands for a draft of a block
    sample: Seen  # some texts, for the scale of features
    sizes: Sizes = Sizes()

    @property
    def hidden(self) -> int:
        return self.trunk.arch.hidden

    def llama(self, layers: int) -> dict[str, Any]:
        """The config of such a model with the recipe's layers."""
        arch, sizes = self.trunk.arch, self.sizes
        return {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16", "vocab_size": arch.vocab,
            "hidden_size": arch.hidden, "intermediate_size": sizes.inner, "num_hidden_layers": layers, "num_attention_heads": sizes.heads,
            "num_key_value_heads": sizes.kv_heads, "head_dim": sizes.dim, "hidden_act": "silu", "rms_norm_eps": arch.norm_eps,
            "rope_theta": arch.rope.theta, "max_position_embeddings": arch.max_positions, "attention_bias": False,
            "tie_word_embeddings": False, "eos_token_id": arch.eos_ids[0],
        }  # fmt: skip

    def norm(self, size: int | None = None) -> nn.RMSNorm:
        return nn.RMSNorm(size or self.hidden, eps=self.trunk.arch.norm_eps)


def linear(inputs: int, outputs: int, gain: float = 1.0) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=gain * inputs**-0.5)
    return layer


class Fusion(nn.Linear):
    """A product with features, of which each has a scale of its own, some of them hundreds of times another's. It learns from features that
    are scaled; `fold` makes it a product with those that are not."""

    def __init__(self, sample: Tensor, outputs: int) -> None:
        super().__init__(sample.shape[-1], outputs, bias=False)
        nn.init.normal_(self.weight, std=sample.shape[-1] ** -0.5)
        self.spread = sample.flatten(0, -2).std(0) + 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x / self.spread).float()

    @torch.no_grad()
    def fold(self) -> None:
        self.weight /= self.spread
        self.spread = torch.ones_like(self.spread)


class Attention(nn.Module):
    def __init__(self, given: Given, inputs: int, head_norms: bool = False) -> None:
        super().__init__()
        self.sizes = sizes = given.sizes
        counts = (sizes.heads, sizes.kv_heads, sizes.kv_heads)
        self.q_proj, self.k_proj, self.v_proj = (linear(inputs, heads * sizes.dim) for heads in counts)
        self.o_proj = linear(sizes.heads * sizes.dim, given.hidden, gain=0.2)
        self.q_norm, self.k_norm = (given.norm(sizes.dim) if head_norms else nn.Identity() for _ in range(2))
        self.inverse = given.trunk.arch.rope.theta ** -(torch.arange(0, sizes.dim, 2) / sizes.dim)

    def queries(self, x: Tensor, positions: Tensor) -> Tensor:
        """[..., rows, inputs] → [..., heads, rows, dim]"""
        return self.rotated(
            self.q_norm(self.q_proj(x).float().unflatten(-1, (self.sizes.heads, self.sizes.dim))).transpose(-2, -3), positions
        )

    def keys(self, x: Tensor, positions: Tensor) -> Tensor:
        return self.rotated(
            self.k_norm(self.k_proj(x).float().unflatten(-1, (self.sizes.kv_heads, self.sizes.dim))).transpose(-2, -3), positions
        )

    def values(self, x: Tensor) -> Tensor:
        return self.v_proj(x).float().unflatten(-1, (self.sizes.kv_heads, self.sizes.dim)).transpose(-2, -3)

    def rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        """positions [rows] or [texts, 1, rows]"""
        angles = positions.unsqueeze(-1) * self.inverse
        first, second = x.chunk(2, -1)
        return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """`mask`: True where a row sees a key; None: causal."""
        seen = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=True)
        return self.o_proj(seen.transpose(-2, -3).flatten(-2))


class MLP(nn.Module):
    def __init__(self, given: Given) -> None:
        super().__init__()
        inner = given.sizes.inner
        self.gate_proj, self.up_proj = linear(given.hidden, inner), linear(given.hidden, inner)
        self.down_proj = linear(inner, given.hidden, gain=0.2)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, given: Given, inputs: int | None = None, input_norm: bool = True, head_norms: bool = False) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(given, inputs or given.hidden, head_norms), MLP(given)
        self.post_attention_layernorm = given.norm()
        if input_norm:
            self.input_layernorm = given.norm()

    def after(self, residual: Tensor, attended: Tensor) -> Tensor:
        """What comes after attention."""
        x = residual + attended
        return x + self.mlp(self.post_attention_layernorm(x))


def unrolled(
    layer: Layer,
    state: Tensor,
    embedded: list[Tensor],
    join: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    norm: Callable[[Tensor], Tensor] = lambda output: output,
) -> Iterator[Tensor]:
    """Drafting as in the engine, after every position at once (training-time test, https://arxiv.org/abs/2503.01840 §3).

    state [texts, rows, hidden], embedded[d] those of token p + 1 + d; `join` makes of the two the residual stream and attention's input,
    and `norm` the next state of the layer's output. At
    depth d row p stands at position p + d and sees the keys of depth 0 up to its own, and then its own of the depths after that:

        keys of depth 0          of depth 1    of depth 2
        0 1 2 … p                p             p
    """
    rows, attention = state.shape[1], layer.self_attn
    causal, own = torch.ones(rows, rows).tril().bool(), torch.eye(rows).bool()
    keys, values = list[Tensor](), list[Tensor]()
    for depth, each in enumerate(embedded):
        residual, x = join(each, state)
        positions = torch.arange(rows) + depth
        keys.append(attention.keys(x, positions))
        values.append(attention.values(x))
        mask = torch.cat([causal] + [own] * depth, 1)
        attended = attention.attend(attention.queries(x, positions), torch.cat(keys, -2), torch.cat(values, -2), mask)
        state = norm(layer.after(residual, attended))
        yield state


class Drafter(nn.Module, ABC):
    own_head = True  # False: it drafts with the trunk's, and needs a token map where it has learnt a part of the vocabulary

    def __init__(self, given: Given) -> None:
        super().__init__()
        self.given = given

    @abstractmethod
    def drafted(self, seen: Seen) -> Drafted:
        """Logits and the trunk's distribution of each draft, as `Drafted` says."""

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """As it is published."""

    def tensors(self) -> dict[str, Tensor]:
        """By their published names."""
        for module in self.modules():
            if isinstance(module, Fusion):
                module.fold()
        return {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in self.state_dict().items()}

    def recurrent(self, seen: Seen, outputs: Callable[[list[Tensor]], Iterator[Tensor]]) -> Drafted:
        """`outputs`: from the embeddings of each depth to the logits of each."""
        rows = seen.ids.shape[1] - DEPTHS
        embedded = [self.given.trunk.rows(seen.ids[:, 1 + d : 1 + d + rows]) for d in range(DEPTHS)]
        for depth, logits in enumerate(outputs(embedded)):
            yield logits, seen.chances[:, 1 + depth : 1 + depth + rows]


class Eagle(Drafter):
    """EAGLE (https://arxiv.org/abs/2401.15077): the trunk's last features and the embedding of the token after them go through one layer,
    and its output is the next features. Embedding and head are the trunk's."""

    own_head = False

    def __init__(self, given: Given) -> None:
        super().__init__(given)
        self.fc = Fusion(self.joined(given.trunk.rows(given.sample.ids), given.sample.last), given.hidden)
        self.layers = nn.ModuleList([Layer(given, input_norm=False)])

    @staticmethod
    def joined(embedded: Tensor, state: Tensor) -> Tensor:
        return torch.cat([embedded, state], -1)

    def join(self, embedded: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        x = self.fc(self.joined(embedded, state))
        return x, x

    def drafted(self, seen: Seen) -> Drafted:
        state = seen.last[:, :-DEPTHS]
        return self.recurrent(seen, lambda embedded: (
            out @ self.given.head.mT for out in unrolled(self.layers[0], state, embedded, self.join)  # type: ignore[arg-type]
        ))  # fmt: skip

    def config(self) -> dict[str, Any]:
        return self.given.llama(1) | {"bias": False}


class NextN(Drafter):
    """An MTP layer as DeepSeek's (https://arxiv.org/abs/2412.19437 §2.2), published apart: the norms of the next token's embedding and of
    the trunk's last features are joined, one layer follows, and its normed output is the next features."""

    own_head = False
    PREFIX = "model.layers.0."
    dropout = 0.0  # of what the norms give, while it learns

    def __init__(self, given: Given) -> None:
        super().__init__(given)
        self.enorm, self.hnorm, self.layer, self.shared_head = given.norm(), given.norm(), Layer(given), nn.Module()
        self.eh_proj, self.shared_head.norm = linear(2 * given.hidden, given.hidden), given.norm()

    def join(self, embedded: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        joined = torch.cat([self.enorm(embedded), self.hnorm(state)], -1)
        x = self.eh_proj(F.dropout(joined, self.dropout, self.training)).float()
        return x, self.layer.input_layernorm(x)

    def states(self, embedded: list[Tensor], state: Tensor) -> Iterator[Tensor]:
        """embedded[d] and state [texts, rows, hidden] → of each depth the rows of the language-model head."""
        return unrolled(self.layer, state, embedded, self.join, self.shared_head.norm)

    def drafted(self, seen: Seen) -> Drafted:
        return self.recurrent(seen, lambda embedded: (out @ self.given.head.mT for out in self.states(embedded, seen.last[:, :-DEPTHS])))

    def config(self) -> dict[str, Any]:
        return self.given.llama(1) | {"architectures": ["LlamaForCausalLMNextN"], "num_nextn_predict_layers": 1}

    def tensors(self) -> dict[str, Tensor]:
        return {self.PREFIX + name.removeprefix("layer."): tensor for name, tensor in super().tensors().items()}


class Eagle3(Drafter):
    """EAGLE-3 (https://arxiv.org/abs/2503.01840): features of three of the trunk's layers; a head of its own over frequent tokens."""

    def __init__(self, given: Given) -> None:
        super().__init__(given)
        self.fc = Fusion(given.sample.taps, given.hidden)
        self.midlayer = Layer(given, inputs=2 * given.hidden)
        self.midlayer.hidden_norm, self.norm = given.norm(), given.norm()
        self.lm_head = linear(given.hidden, len(given.tokens))
        self.lm_head.weight.data.copy_(given.head)

    def join(self, embedded: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return state, torch.cat([self.midlayer.input_layernorm(embedded), self.midlayer.hidden_norm(state)], -1)

    def drafted(self, seen: Seen) -> Drafted:
        state = self.fc(seen.taps[:, :-DEPTHS])
        return self.recurrent(seen, lambda embedded: (
            self.lm_head(self.norm(out)) for out in unrolled(self.midlayer, state, embedded, self.join)
        ))  # fmt: skip

    def config(self) -> dict[str, Any]:
        after = [tap + 1 for tap in self.given.trunk.taps]  # the layers that these are the inputs of
        own = {"draft_vocab_size": len(self.given.tokens), "eagle_aux_hidden_state_layer_ids": after}
        return self.given.llama(1) | {"architectures": ["LlamaForCausalLMEagle3"]} | own

    def tensors(self) -> dict[str, Tensor]:
        known = torch.zeros(self.given.trunk.arch.vocab, dtype=torch.bool)
        known[self.given.tokens] = True
        return super().tensors() | {"d2t": self.given.tokens - torch.arange(len(self.given.tokens)), "t2d": known}


class Residual(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden, hidden)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


class Medusa(Drafter):
    """Medusa (https://arxiv.org/abs/2401.10774): a head for each draft, which knows nothing of the drafts before it. They begin as the
    trunk's own head."""

    def __init__(self, given: Given) -> None:
        super().__init__(given)
        for depth in range(DEPTHS):
            head = linear(given.hidden, len(given.tokens))
            head.weight.data.copy_(given.head)
            self.add_module(str(depth), nn.Sequential(Residual(given.hidden), head))

    def drafted(self, seen: Seen) -> Drafted:
        rows = seen.ids.shape[1] - DEPTHS
        for depth, head in enumerate(self.children()):
            yield head(seen.last[:, :rows]), seen.chances[:, 1 + depth : 1 + depth + rows]

    def config(self) -> dict[str, Any]:
        sizes = {"hidden_size": self.given.hidden, "vocab_size": len(self.given.tokens)}
        heads = {"medusa_num_heads": DEPTHS, "medusa_num_layers": 1}
        return {"architectures": ["MedusaModel"], "model_type": "medusa", "torch_dtype": "bfloat16"} | sizes | heads


class DFlash(Drafter):
    """DFlash (https://arxiv.org/abs/2602.06036): one pass over the last token and masks gives a block of drafts. The block's rows see each
    other and the trunk's features of all tokens before it. Blocks of random places are learned together, one for every eight tokens."""

    own_head = False

    def __init__(self, given: Given) -> None:
        super().__init__(given)
        self.fc, self.hidden_norm, self.norm = Fusion(given.sample.taps, given.hidden), given.norm(), given.norm()
        self.layers = nn.ModuleList(Layer(given, head_norms=True) for _ in range(BLOCK_LAYERS))
        self.generator = torch.Generator().manual_seed(0)

    def drafted(self, seen: Seen) -> Drafted:
        texts, length = seen.ids.shape
        anchors = self.anchors(texts, length)
        places = (anchors.unsqueeze(-1) + torch.arange(BLOCK)).flatten(1)  # [texts, rows]
        ids = seen.ids.gather(1, places).unflatten(1, (-1, BLOCK)).clone()
        ids[..., 1:] = self.given.mask
        before = torch.arange(length) < anchors.repeat_interleave(BLOCK, 1).unsqueeze(-1)  # [texts, rows, length]
        block = torch.arange(places.shape[1]) // BLOCK
        mask = torch.cat([before, (block == block.unsqueeze(-1)).expand(texts, -1, -1)], -1).unsqueeze(1)
        x, context = self.given.trunk.rows(ids.flatten(1)), self.hidden_norm(self.fc(seen.taps))
        for layer in self.layers:
            x = self.passed(layer, x, context, places.unsqueeze(1), mask)  # type: ignore[arg-type]
        logits = (self.norm(x) @ self.given.head.mT).unflatten(1, (-1, BLOCK))
        for depth in range(BLOCK - 1):
            yield logits[:, :, depth + 1], seen.chances[torch.arange(texts).unsqueeze(1), anchors + depth]

    def anchors(self, texts: int, length: int) -> Tensor:
        """Where blocks begin [texts, blocks]."""
        return 1 + torch.rand(texts, length - BLOCK, generator=self.generator).argsort(1)[:, : length // BLOCK]

    def passed(self, layer: Layer, x: Tensor, context: Tensor, places: Tensor, mask: Tensor) -> Tensor:
        attention, normed = layer.self_attn, layer.input_layernorm(x)
        length = torch.arange(context.shape[1])
        keys = torch.cat([attention.keys(context, length), attention.keys(normed, places)], -2)
        values = torch.cat([attention.values(context), attention.values(normed)], -2)
        return layer.after(x, attention.attend(attention.queries(normed, places), keys, values, mask))

    def config(self) -> dict[str, Any]:
        trunk = self.given.trunk
        block = {"mask_token_id": self.given.mask, "target_layer_ids": list(trunk.taps)}
        kinds = {"layer_types": ["full_attention"] * BLOCK_LAYERS, "num_target_layers": trunk.arch.num_layers, "block_size": BLOCK}
        own = {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "dflash_config": block}
        return self.given.llama(BLOCK_LAYERS) | own | kinds


class Standalone(Drafter):
    """A small Llama with the trunk's vocabulary, which learns the trunk's distribution and gets nothing of it but text."""

    def __init__(self, given: Given) -> None:
        super().__init__(given)
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(len(given.tokens), given.hidden)
        nn.init.normal_(self.model.embed_tokens.weight, std=given.hidden**-0.5)
        self.model.layers, self.model.norm = nn.ModuleList(Layer(given) for _ in range(LAYERS)), given.norm()

    def drafted(self, seen: Seen) -> Drafted:
        x, positions = self.model.embed_tokens(seen.ids), torch.arange(seen.ids.shape[1])
        for layer in self.model.layers:
            attention, normed = layer.self_attn, layer.input_layernorm(x)
            q, k, v = attention.queries(normed, positions), attention.keys(normed, positions), attention.values(normed)
            x = layer.after(x, attention.attend(q, k, v))
        yield self.model.norm(x) @ self.model.embed_tokens.weight.mT, seen.chances

    def config(self) -> dict[str, Any]:
        return self.given.llama(LAYERS) | {"tie_word_embeddings": True}


DRAFTERS: dict[str, type[Drafter]] = {
    "eagle": Eagle,
    "nextn": NextN,
    "eagle3": Eagle3,
    "medusa": Medusa,
    "dflash": DFlash,
    "standalone": Standalone,
}
