"""Gemma 4's assistants: some layers that have queries alone. Each attends to what the trunk's last layer of
its kind has stored, with a window or without. A row joins the trunk's embedding of a token with the hidden
state of the token before it, and gives back a state of the trunk's size, which later drafts get.

Head and embedding are the assistant's own and one matrix. In the small ones, tokens are in clusters, and only
those of the clusters with the best centroids are proposed. Here the logits of all are computed, and those of
other clusters are masked.

Each rank of a model has a whole assistant, and attends with the queries whose keys it has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from mtpserve.config import EngineConfig
from mtpserve.core.arch.model import Attention, DraftArch, Features, KVReader, LayerKind, ModelArch, attending
from mtpserve.core.batch import Hidden
from mtpserve.core.errors import ConfigError
from mtpserve.core.protocols.attention import Context
from mtpserve.core.protocols.models import DraftModel, Trunk
from mtpserve.heads.head import Head, Separate, opened, same
from mtpserve.heads.kinds import FROZEN, algorithm_of
from mtpserve.layers.decoder import DecoderModel, Methods
from mtpserve.layers.embedding import Embedding, TiedHead
from mtpserve.layers.kernels import Kernels
from mtpserve.layers.linear import Linear
from mtpserve.layers.norm import RMSNorm
from mtpserve.layers.rope import Rope
from mtpserve.models import gemma4
from mtpserve.weights.checkpoint.hf import read_config
from mtpserve.weights.checkpoint.hf_config import HFConfig
from mtpserve.weights.rules import Copy, Drop, Rule

FEATURES = Features(last="post", has_boundary=False)


class ClustersArch(NamedTuple):
    number: int
    best: int  # of which tokens are proposed


class Clusters(nn.Module):
    """Masks the tokens of all clusters but the best ones. `ordering`: the tokens, cluster by cluster."""

    def __init__(self, arch: ModelArch, clusters: ClustersArch, methods: Methods) -> None:
        super().__init__()
        self.number, self.best, self.vocab = clusters.number, clusters.best, arch.vocab
        self.centroids = Linear(arch.hidden, (clusters.number,), methods.draft)
        self.ordering: Tensor
        self.register_buffer("ordering", torch.empty(arch.vocab, dtype=torch.int64))
        self.numbers: Tensor | None = None  # [vocabulary], of each token's cluster

    def finish_loading(self) -> None:
        order = self.ordering
        of_places = torch.arange(self.vocab, device=order.device) // (self.vocab // self.number)
        self.numbers = torch.zeros_like(order).scatter_(0, order, of_places)

    def forward(self, head: Tensor, logits: Tensor) -> Tensor:
        """head [T, hidden], logits [T, vocabulary]"""
        assert self.numbers is not None
        best = self.centroids(head, torch.float32).topk(self.best, -1).indices
        others = torch.ones(len(head), self.number, dtype=torch.bool, device=head.device)
        return logits.masked_fill(others.scatter_(1, best, False)[:, self.numbers], -torch.inf)


class AssistantModel(nn.Module):
    """core.protocols.models.DraftModel: it stores nothing, see spec/draft/frozen."""

    lag, at_once, mask, tokens, features = 1, False, None, None, FEATURES

    def __init__(
        self, arch: ModelArch, clusters: ClustersArch | None, trunk: DecoderModel, methods: Methods,
        dtype: torch.dtype, positions: int, kernels: Kernels,
    ) -> None:  # fmt: skip
        super().__init__()
        hidden, ranks, method = trunk.arch.hidden, trunk.kernels.ranks, methods.draft
        self.borrowed = [trunk]
        self.layers: tuple[LayerKind, ...] = trunk.arch.layers[trunk.arch.num_layers :]  # of this rank
        self.join, self.give_back = (
            Linear(2 * hidden, (arch.hidden,), method),
            Linear(arch.hidden, (hidden,), method),
        )
        self.blocks = nn.ModuleList(
            gemma4.decoder_layer(arch, number, method, kernels, False, ranks)
            for number in range(len(arch.layers))
        )
        self.norm = RMSNorm(arch.hidden, arch.norm_eps, kernels)
        self.rope = Rope(arch.rope, positions, dtype, arch.window_rope)
        self.embed = Embedding(arch.vocab, arch.hidden)
        self.head = TiedHead(self.embed, methods.draft_head or methods.head)
        self.clusters = None if clusters is None else Clusters(arch, clusters, methods)

    def step(
        self, ids: Tensor, positions: Tensor, state: Tensor | None, contexts: Sequence[Context]
    ) -> Hidden:
        assert state is not None
        x, residual = self.join(torch.cat([self.borrowed[0].embed(ids), state], -1)), None
        rotation = self.rope(positions)
        for block, context in zip(self.blocks, contexts, strict=True):
            x, residual = block(x, residual, rotation, context)
        normed, _ = self.norm.add(x, residual)
        return Hidden(normed, self.give_back(normed))

    extend = step

    def store_kv(
        self, ids: Tensor, positions: Tensor, features: Tensor | None, contexts: Sequence[Context]
    ) -> None:
        """Later rows need nothing of these."""

    def logits(self, head: Tensor, depth: int) -> Tensor:
        logits = self.head(head, torch.float32)
        return logits if self.clusters is None else self.clusters(head, logits)  # type: ignore[no-any-return]


class Assistant(Separate):
    """core.protocols.DraftSource."""

    def open(self, directory: Path, config: EngineConfig, trunk: ModelArch) -> Head:
        values, checkpoint = read_config(directory), opened(directory, config)
        if trunk.sandwich is None:
            raise ConfigError(
                f"--speculative-draft-model-path: {values.path}: an assistant reads the keys and values of a "
                f"Gemma 4 model, and the model is a {trunk.family}"
            )
        same("backbone_hidden_size", values, values.get_int("backbone_hidden_size", 1536), trunk.hidden)
        arch = arch_of(values, trunk)
        clusters = clusters_of(values, arch.vocab)
        kind = f"Gemma 4 assistant ({len(arch.layers)} layers of {arch.hidden}, without keys of its own)"
        drafts = DraftArch(kind, arch.layers, FEATURES, scale=arch.scale, own_head=True)
        make = partial(AssistantModel, arch, clusters)
        return Head(checkpoint, drafts, rules(arch, clusters is not None), make)


class NextN(Assistant):
    """The checkpoint's own MTP layer, or one that was published apart: in the same layout, or as an
    assistant."""

    def in_checkpoint(self, path: str | None) -> bool:
        return path is None or algorithm_of(Path(path)) != FROZEN

    def build(self, trunk: Trunk) -> DraftModel:
        layer = cast(DecoderModel, trunk).mtp_head
        return super().build(trunk) if layer is None else cast(DraftModel, layer)


def arch_of(values: HFConfig, trunk: ModelArch) -> ModelArch:
    """The assistant's architecture, whose layers read what the trunk's store. Raises LoadError,
    UnsupportedModel, or ConfigError where they do not fit together."""
    for name in ("hidden_size_per_layer_input", "use_double_wide_mlp"):
        if values.raw(name):
            raise values.unsupported(name, "none, in an assistant")
    # Newer versions of transformers count all layers as readers, others none.
    whole = values.values | {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0}
    arch = gemma4.arch(HFConfig(values.path, whole, values.prefix).with_default("eos_token_id", 0), 0)
    same("vocab_size", values, arch.vocab, trunk.vocab)
    storing = attending(trunk.layers)
    readers = []
    for kind in arch.layers:
        assert isinstance(kind, Attention)
        has_window = kind.window is not None
        sources = [
            (number, other)
            for number, other in enumerate(storing)
            if isinstance(other, Attention) and (other.window is not None) == has_window
        ]
        values.require(bool(sources), "layer_types", "kinds of layers that the model has, too")
        number, source = sources[-1]
        same("head_dim", values, kind.kv.key_dim, source.kv.key_dim)
        values.require(
            arch.heads % source.kv.heads == 0,
            "num_attention_heads",
            f"a multiple of the model's {source.kv.heads} key heads",
        )
        readers.append(KVReader(replace(source, heads=arch.heads), number))
    return replace(arch, layers=tuple(readers), logit_cap=None)


def clusters_of(values: HFConfig, vocab: int) -> ClustersArch | None:
    if not values.get_bool("use_ordered_embeddings", False):
        return None
    number = values.get_int("num_centroids", 2048, at_least=1)
    values.require(vocab % number == 0, "num_centroids", f"a divisor of vocab_size = {vocab}")
    best = values.get_int("centroid_intermediate_top_k", 32, at_least=1)
    values.require(best <= number, "centroid_intermediate_top_k", f"at most num_centroids = {number}")
    return ClustersArch(number, best)


def rules(arch: ModelArch, has_clusters: bool) -> list[Rule]:
    ends = [
        (r"pre_projection\.weight", "join.weight"),
        (r"post_projection\.weight", "give_back.weight"),
        (r"model\.embed_tokens\.weight", "embed.weight"),
        (r"model\.norm\.weight", "norm.weight"),
    ]
    if has_clusters:
        ends += [
            (r"masked_embedding\.centroids\.weight", "clusters.centroids.weight"),
            (r"masked_embedding\.token_ordering", "clusters.ordering"),
        ]
    layers = [
        Rule(
            rf"model\.layers\.{number}\.{name}",
            None if isinstance(how, Drop) else f"blocks.{number}.{target}",
            how,
        )
        for number in range(len(arch.layers))
        for name, target, how in gemma4.layer_names(arch, number)
    ]
    tied = Rule(r"lm_head\.weight", None, Drop("tied to the embedding"))
    return [*(Rule(name, target, Copy()) for name, target in ends), *layers, tied]


FROZEN_KV_MTP = Assistant()
MTP = NextN()
