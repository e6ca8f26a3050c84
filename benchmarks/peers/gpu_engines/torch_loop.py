"""The second yardstick: a hand-written decoding loop of torch.compile and one CUDA graph per batch. Plain decoding alone.

The batch stays as it is, keys and values lie in a static cache that attention reads whole, and the next token is the argmax: no
scheduler, no pages, no other sampling. Layers are Qwen2's, Qwen3's and MiMo's. On a CPU the same loop runs eagerly.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from peers.gpu_engines.load import Sizes
from peers.gpu_engines.shapes import read_config
from torch import Tensor

PREFILL_REQUESTS = 32  # whose prompts are computed at once
STD = 0.02  # of random weights


@dataclass(frozen=True, slots=True)
class Heads:
    query: int
    kv: int
    dim: int
    eps: float
    bias: bool
    qk_norm: bool


@dataclass(frozen=True, slots=True)
class Layer:
    norm1: Tensor  # [hidden]
    norm2: Tensor  # [hidden]
    qkv: Tensor  # [hidden, (query + 2 * kv) * dim]
    qkv_bias: Tensor  # [(query + 2 * kv) * dim]
    q_norm: Tensor  # [dim]
    k_norm: Tensor  # [dim]
    o: Tensor  # [query * dim, hidden]
    gate_up: Tensor  # [hidden, 2 * intermediate]
    down: Tensor  # [intermediate, hidden]


@dataclass(slots=True)
class BatchState:
    keys: Tensor  # [layers, batch, kv, length, dim]
    values: Tensor  # the same
    position: Tensor  # [1]: where the next keys go
    token: Tensor  # [batch]: the last ones
    graph: Any = None  # torch.cuda.CUDAGraph; None on a CPU


@dataclass(slots=True)
class Requests:
    queue: dict[str, tuple[list[int], int]] = field(default_factory=dict)  # prompt, max_tokens
    num_tokens: dict[str, int] = field(default_factory=dict)  # that are still to come


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def project(x: Tensor, layer: Layer, cos: Tensor, sin: Tensor, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    """x: [..., hidden] → queries [..., query, dim], keys and values [..., kv, dim]."""
    qkv = rms_norm(x, layer.norm1, heads.eps) @ layer.qkv
    if heads.bias:
        qkv = qkv + layer.qkv_bias
    q, k, v = qkv.unflatten(-1, (heads.query + 2 * heads.kv, heads.dim)).split((heads.query, heads.kv, heads.kv), -2)
    if heads.qk_norm:
        q, k = rms_norm(q, layer.q_norm, heads.eps), rms_norm(k, layer.k_norm, heads.eps)
    return rotate(q, cos, sin), rotate(k, cos, sin), v


def finish(x: Tensor, attention_output: Tensor, layer: Layer, eps: float) -> Tensor:
    """attention_output: [..., query * dim]. The second half of a layer."""
    x = x + attention_output @ layer.o
    gate, up = (rms_norm(x, layer.norm2, eps) @ layer.gate_up).chunk(2, -1)
    return x + (F.silu(gate) * up) @ layer.down


def decode_layer(
    x: Tensor, layer: Layer, keys: Tensor, values: Tensor, position: Tensor, mask: Tensor, cos: Tensor, sin: Tensor, heads: Heads
) -> Tensor:
    """x: [batch, hidden]; keys, values: [batch, kv, length, dim]; mask: [length], positions after `position`."""
    q, k, v = project(x, layer, cos, sin, heads)
    keys.index_copy_(2, position, k[:, :, None])
    values.index_copy_(2, position, v[:, :, None])
    scores = (q.unflatten(1, (heads.kv, heads.query // heads.kv)) @ keys.transpose(-1, -2)).float() * heads.dim**-0.5
    weights = torch.softmax(scores.masked_fill(mask, float("-inf")), -1).to(x.dtype)
    return finish(x, (weights @ values).flatten(1), layer, heads.eps)


def random_layer(config: dict[str, Any], heads: Heads, device: str) -> Layer:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    qkv_dim = (heads.query + 2 * heads.kv) * heads.dim
    sizes = (hidden,), (hidden,), (hidden, qkv_dim), (qkv_dim,), (heads.dim,), (heads.dim,)
    products = (heads.query * heads.dim, hidden), (hidden, 2 * inner), (inner, hidden)
    return Layer(*(random_tensor(size, device) for size in (*sizes, *products)))


def random_tensor(size: tuple[int, ...], device: str) -> Tensor:
    return torch.empty(size, dtype=torch.bfloat16, device=device).normal_(std=STD)


class TorchLoop:
    def __init__(self, directory: Path, drafts: int, sizes: Sizes, kv_bytes: int, options: dict[str, Any]) -> None:
        """Its cache has the size that requests need, whatever `kv_bytes` says. Raises ValueError for drafts and for options."""
        if drafts or options:
            raise ValueError(f"the loop decodes plainly and has no options, got {drafts} drafts and {options}")
        config = read_config(directory)
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        qk_norm = config["model_type"] == "qwen3"
        query, kv, dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
        self.heads = Heads(query, kv, dim, config["rms_norm_eps"], not qk_norm, qk_norm)
        self.length, hidden, vocab = sizes.context_length(drafts), config["hidden_size"], config["vocab_size"]
        torch.manual_seed(0)
        self.layers = [random_layer(config, self.heads, self.device) for _ in range(config["num_hidden_layers"])]
        self.embedding, self.norm = random_tensor((vocab, hidden), self.device), random_tensor((hidden,), self.device)
        self.head = self.embedding if config["tie_word_embeddings"] else random_tensor((vocab, hidden), self.device)
        angles = torch.arange(self.length)[:, None] * config["rope_theta"] ** (-torch.arange(0, dim, 2) / dim)
        angles = torch.cat((angles, angles), -1)[:, None]  # [length, 1, dim]
        self.cos, self.sin = (wave.to(torch.bfloat16).to(self.device) for wave in (angles.cos(), angles.sin()))
        self.decode_layer = torch.compile(decode_layer, dynamic=False) if self.device == "cuda" else decode_layer
        self.states: dict[int, BatchState] = {}
        self.state: BatchState | None = None
        self.requests = Requests()

    def add(self, request_id: str, prompt: list[int], max_tokens: int) -> None:
        self.requests.queue[request_id] = prompt, max_tokens

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self.requests.queue or self.requests.num_tokens)

    def abort_all(self) -> None:
        self.requests = Requests()

    def settings(self) -> dict[str, str]:
        return {"version": torch.__version__, "compiled": str(self.device == "cuda")}

    @torch.inference_mode()
    def step(self) -> dict[str, int]:
        """Requests that wait begin together, in place of those before."""
        if queue := self.requests.queue:
            self.requests = Requests(num_tokens={name: max_tokens for name, (_, max_tokens) in queue.items()})
            state = self.state = self.state_of(len(queue))
            self.prefill(state, [prompt for prompt, _ in queue.values()])
        else:
            assert self.state is not None
            state = self.state
            self.decode(state) if state.graph is None else state.graph.replay()
        state.token.tolist()  # engines read their tokens too
        counts = dict.fromkeys(self.requests.num_tokens, 1)
        self.requests.num_tokens = {name: tokens - 1 for name, tokens in self.requests.num_tokens.items() if tokens > 1}
        return counts

    def state_of(self, batch: int) -> BatchState:
        if batch in self.states:
            return self.states[batch]
        size = (len(self.layers), batch, self.heads.kv, self.length, self.heads.dim)
        keys, values = (torch.zeros(size, dtype=torch.bfloat16, device=self.device) for _ in range(2))
        position, token = (torch.zeros(number, dtype=torch.long, device=self.device) for number in (1, batch))
        state = self.states[batch] = BatchState(keys, values, position, token)
        if self.device == "cuda":
            for _ in range(3):  # compiles before it captures
                self.decode(state)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.decode(state)
            state.graph = graph
        return state

    def prefill(self, state: BatchState, prompts: list[list[int]]) -> None:
        """Prompts have one length."""
        tokens = torch.tensor(prompts, device=self.device)
        length = tokens.shape[1]
        for part in torch.arange(len(prompts), device=self.device).split(PREFILL_REQUESTS):
            x = F.embedding(tokens[part], self.embedding)
            for layer, keys, values in zip(self.layers, state.keys, state.values, strict=True):
                q, k, v = (rows.transpose(1, 2) for rows in project(x, layer, self.cos[:length], self.sin[:length], self.heads))
                keys[part, :, :length], values[part, :, :length] = k, v
                attention_output = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
                x = finish(x, attention_output.transpose(1, 2).flatten(2), layer, self.heads.eps)
            state.token[part] = self.next_token(x[:, -1])
        state.position.fill_(length)

    def decode(self, state: BatchState) -> None:
        mask = torch.arange(self.length, device=self.device) > state.position
        cos, sin = self.cos[state.position], self.sin[state.position]
        x = F.embedding(state.token, self.embedding)
        for layer, keys, values in zip(self.layers, state.keys, state.values, strict=True):
            x = self.decode_layer(x, layer, keys, values, state.position, mask, cos, sin, self.heads)
        state.token.copy_(self.next_token(x))
        state.position.add_(1).clamp_(max=self.length - 1)

    def next_token(self, x: Tensor) -> Tensor:
        return (rms_norm(x, self.norm, self.heads.eps) @ self.head.T).argmax(-1)
