"""The demo model as it is trained: DeepSeek-V3 in miniature, with autograd, without a cache.

Its parameters have the names of the published checkpoint, so that saving is `state_dict()`. Serving does not use this file:
mtpserve's `models/deepseek.py` loads the saved checkpoint.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CONFIG: dict[str, object] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "n_shared_experts": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "kv_lora_rank": 512,
    "q_lora_rank": 128,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}
V, H, L, HEADS = 2048, 256, 6, 2
NOPE, ROPE, RANK, Q_RANK, V_DIM = 128, 64, 512, 128, 128
EXPERTS, TOP_K, GROUPS, TOP_GROUPS, SCALE = 8, 2, 4, 2, 1.5


def linear(inputs: int, outputs: int, gain: float = 1.0) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=gain * inputs**-0.5)
    return layer


def norm(size: int = H) -> nn.RMSNorm:
    return nn.RMSNorm(size, eps=1e-6)


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Interleaved RoPE on the last dimension.  x [..., tokens, 64], positions [tokens]"""
    angle = positions[:, None].float() * 10000.0 ** (-torch.arange(0, ROPE, 2) / ROPE)
    cos, sin = angle.cos(), angle.sin()
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_a_proj, self.q_a_layernorm = linear(H, Q_RANK), norm(Q_RANK)
        self.q_b_proj = linear(Q_RANK, HEADS * (NOPE + ROPE))
        self.kv_a_proj_with_mqa, self.kv_a_layernorm = linear(H, RANK + ROPE), norm(RANK)
        self.kv_b_proj = linear(RANK, HEADS * (NOPE + V_DIM))
        self.o_proj = linear(HEADS * V_DIM, H, gain=0.2)

    def qkv(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [batch, tokens, H] -> q, k [batch, heads, tokens, 192], v [batch, heads, tokens, 128]"""
        b, t, _ = x.shape
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).view(b, t, HEADS, NOPE + ROPE).transpose(1, 2)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split([RANK, ROPE], -1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).view(b, t, HEADS, NOPE + V_DIM).transpose(1, 2)
        k_rope = rotate(k_rope, positions)[:, None].expand(b, HEADS, t, ROPE)
        q = torch.cat([q[..., :NOPE], rotate(q[..., NOPE:], positions)], -1)
        return q, torch.cat([kv[..., :NOPE], k_rope], -1), kv[..., NOPE:]

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        q, k, v = self.qkv(x, positions)
        v = F.pad(v, (0, NOPE + ROPE - V_DIM))  # the fast CPU kernel wants equal head sizes
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)[..., :V_DIM]
        return self.o_proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = linear(H, size), linear(H, size), linear(size, H, gain=0.2)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, H) * H**-0.5)
        self.e_score_correction_bias = nn.Buffer(torch.zeros(EXPERTS))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [tokens, H] -> weights, ids [tokens, TOP_K]. In training the bias moves towards even load (DeepSeek-V3 §2.1.2)."""
        scores = F.linear(x, self.weight).sigmoid()
        choice = (scores + self.e_score_correction_bias).detach()
        groups = choice.view(-1, GROUPS, EXPERTS // GROUPS).sum(-1).topk(TOP_GROUPS).indices
        allowed = torch.zeros(len(x), GROUPS, dtype=torch.bool).scatter_(1, groups, True)
        choice = choice.masked_fill(~allowed.repeat_interleave(EXPERTS // GROUPS, 1), -torch.inf)
        ids = choice.topk(TOP_K).indices
        if self.training:
            load = torch.bincount(ids.flatten(), minlength=EXPERTS).float()
            self.e_score_correction_bias += 1e-3 * (load.mean() - load).sign()
        weights = scores.gather(1, ids)
        return weights / weights.sum(-1, keepdim=True) * SCALE, ids


class MoE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.shared_experts = Gate(), MLP(96)
        self.experts = nn.ModuleList(MLP(96) for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        weights, ids = self.gate(flat)
        out = self.shared_experts(flat)
        for i, expert in enumerate(self.experts):
            rows, slot = (ids == i).nonzero(as_tuple=True)
            out = out.index_add(0, rows, expert(flat[rows]) * weights[rows, slot, None])
        return out.view_as(x)


class Layer(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.input_layernorm, self.self_attn = norm(), Attention()
        self.post_attention_layernorm = norm()
        self.mlp = MLP(512) if index < 1 else MoE()

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), positions)
        return x + self.mlp(self.post_attention_layernorm(x))


class MTPLayer(Layer):
    """Row p: the trunk's (or, recycled, its own) hidden state at p and the embedding of token p+1; predicts token p+2."""

    def __init__(self) -> None:
        super().__init__(L)
        self.enorm, self.hnorm, self.eh_proj = norm(), norm(), linear(2 * H, H)
        self.shared_head = nn.ModuleDict({"norm": norm()})

    def fuse(self, embedding: Tensor, hidden: Tensor) -> Tensor:
        return self.eh_proj(torch.cat([self.enorm(embedding), self.hnorm(hidden)], -1))

    def unroll(self, hidden: Tensor, embeddings: list[Tensor]) -> list[Tensor]:
        """Drafting as in the engine, for every row at once. -> per depth the normed output [batch, rows, H]

        embeddings[d] is the embedding of token p+1+d for row p. Depth 0 writes the keys that later rows see; at depth d
        row p has position p+d and attends to the depth-0 keys 0..p and then to its own keys of depths 1..d:

            keys of depth 0          own keys, one a depth
            0 1 2 … p | p+1 (not yet there) |  d=1  d=2 …
        """
        rows, attn = hidden.shape[1], self.self_attn
        outputs: list[Tensor] = []
        own: list[tuple[Tensor, Tensor]] = []
        for depth, embedding in enumerate(embeddings):
            positions = torch.arange(rows) + depth
            x = self.fuse(embedding, hidden)
            q, k, v = attn.qkv(self.input_layernorm(x), positions)
            if depth == 0:
                first_k, first_v = k, v
            else:
                own.append((k, v))
            scores = (q @ first_k.transpose(-1, -2)).masked_fill(~torch.ones(rows, rows).tril().bool(), -torch.inf)
            extra = [(q * k_d).sum(-1, keepdim=True) for k_d, _ in own]
            weights = (torch.cat([scores, *extra], -1) * (NOPE + ROPE) ** -0.5).softmax(-1)
            out = weights[..., :rows] @ first_v
            for d, (_, v_d) in enumerate(own):
                out = out + weights[..., rows + d : rows + d + 1] * v_d
            x = x + attn.o_proj(out.transpose(1, 2).flatten(2))
            x = x + self.mlp(self.post_attention_layernorm(x))
            hidden = self.shared_head["norm"](x)
            outputs.append(hidden)
        return outputs


class Trunk(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(V, H)
        nn.init.normal_(self.embed_tokens.weight, std=0.5)
        self.layers = nn.ModuleList([*(Layer(i) for i in range(L)), MTPLayer()])
        self.norm = norm()


class DemoModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = Trunk()
        self.lm_head = linear(H, V, gain=0.5)

    @property
    def mtp(self) -> MTPLayer:
        layer = self.model.layers[L]
        assert isinstance(layer, MTPLayer)
        return layer

    def hidden(self, ids: Tensor) -> Tensor:
        """ids [batch, tokens] -> the trunk's hidden states after the final norm [batch, tokens, H]"""
        x, positions = self.model.embed_tokens(ids), torch.arange(ids.shape[1])
        for layer in self.model.layers[:L]:
            x = layer(x, positions)
        return self.model.norm(x)

    def draft_hidden(self, hidden: Tensor, ids: Tensor, depths: int) -> list[Tensor]:
        """-> per depth d the head's input for rows 0 … T-1-depths, which predicts token p+2+d."""
        rows = ids.shape[1] - depths
        shifted = [self.model.embed_tokens(ids[:, 1 + d : 1 + d + rows]) for d in range(depths)]
        return self.mtp.unroll(hidden[:, :rows], shifted)
