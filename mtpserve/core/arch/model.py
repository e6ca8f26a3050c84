"""A model's dimensions: read from its config by the family file, used by the cache, the planner and
`inspect`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import lcm
from typing import Literal

from mtpserve.core.arch.gates import ClampedGate, GeluGate, LayerGates, Ungated
from mtpserve.core.arch.latent import IndexerArch, MLAArch, SharedKVArch
from mtpserve.core.arch.rope import RopeArch
from mtpserve.core.arch.sandwich import SandwichArch
from mtpserve.core.arch.streams import StreamsArch

Norm = Literal["pre", "post"]
FP8_BLOCK = (128, 128)  # rows and columns that share one scale in float8 checkpoints


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The KV cache of one token in one layer. `mla`: one latent row of `key_dim` numbers whose first
    `value_dim` are the value."""

    kind: Literal["gqa", "mla"]
    heads: int
    key_dim: int
    value_dim: int

    @property
    def numbers(self) -> int:
        """Numbers stored per token and layer."""
        return self.heads * (self.key_dim + (self.value_dim if self.kind == "gqa" else 0))

    def __str__(self) -> str:
        return f"{self.heads} heads x {self.key_dim}" if self.kind == "gqa" else f"latent, {self.key_dim}"


@dataclass(frozen=True, slots=True)
class Selected:
    """A row attends only to the `best` tokens that it may see, or to all if there are fewer (DeepSeek-V3.2,
    https://arxiv.org/abs/2512.02556 §2.1). The layer scores tokens by an index key: `key_dim` stored numbers
    per token. 0: it stores none, and takes the tokens that the last layer before it selected."""

    best: int
    key_dim: int


@dataclass(frozen=True, slots=True)
class Compressed:
    """Besides its window a row attends to entries, latent rows like the layer's own that stand for `every`
    tokens each, as soon as it has seen all of these: to all entries, or to those that are `selected` by index
    keys (DeepSeek-V4's two kinds of compressed attention). `overlap`: an entry is made of the `every` tokens
    before its own, too."""

    every: int
    overlap: bool = False
    selected: Selected | None = None

    @property
    def span(self) -> int:
        """Tokens that an entry is made of."""
        return 2 * self.every if self.overlap else self.every

    @property
    def index_dim(self) -> int:
        return 0 if self.selected is None else self.selected.key_dim

    def inputs(self, entry: int) -> int:
        """Numbers that a token keeps for entries of `entry` numbers and their index keys: values and gates,
        of both entries that it is a part of."""
        return 2 * (self.span // self.every) * (entry + self.index_dim)


@dataclass(frozen=True, slots=True)
class Attention:
    """A layer kind: attention with KV of layout `kv`. `window`: a row attends to itself and the window - 1
    tokens before it; None: to itself and all tokens before it. `selected`: to some of these; None: to all.
    `compressed`: what it attends to besides its window."""

    kv: KVLayout
    window: int | None = None
    selected: Selected | None = None
    heads: int | None = None  # query heads; None: ModelArch.heads
    compressed: Compressed | None = None

    @property
    def index_dim(self) -> int:
        """Numbers of a token's index key; 0: there is none."""
        return 0 if self.selected is None else self.selected.key_dim

    @property
    def numbers(self) -> int:
        """Numbers stored per token and layer."""
        return self.kv.numbers + self.index_dim

    @property
    def kv_window(self) -> int | None:
        """Tokens that the next row needs of those before it, itself included: the window, or what an entry is
        made of. None: all."""
        return (
            self.window
            if self.window is None or self.compressed is None
            else max(self.window, self.compressed.span)
        )

    @property
    def inputs(self) -> int:
        """Numbers stored per token and layer of which entries are made. They are not rounded to fewer bits
        than is computed with."""
        return 0 if self.compressed is None else self.compressed.inputs(self.kv.key_dim)

    @property
    def entry(self) -> int:
        """Numbers stored per layer of every so many tokens; 0: there are no entries."""
        return 0 if self.compressed is None else self.kv.numbers + self.compressed.index_dim

    def __str__(self) -> str:
        window = "" if self.window is None else f", window {self.window:,}"
        index = f", index key {self.index_dim}" if self.index_dim else ""
        beside = "" if self.inputs == 0 else f", {self.inputs:,} inputs of entries"
        return f"{self.kv}{window}{beside}" + (
            "" if self.selected is None else f"{index}, best {self.selected.best:,}"
        )

    @property
    def entries(self) -> str:
        """A description of the entries, for logs."""
        assert self.compressed is not None
        selector, index = self.compressed.selected, self.compressed.index_dim
        picked = "" if selector is None else f", index key {index}, best {selector.best:,}"
        return f"{self.kv}, one of {self.compressed.every:,} tokens{picked}"


@dataclass(frozen=True, slots=True)
class Recurrent:
    """A layer kind: a recurrence after a short convolution, by the gated delta rule
    (https://arxiv.org/abs/2412.06464) or Mamba-2's (https://arxiv.org/abs/2405.21060 §7), whose groups and
    heads are the key and value heads. It keeps of each request a matrix [key_dim, value_dim] for each of the
    value heads, and the convolution's inputs of the last `taps` - 1 tokens. A key head serves value_heads /
    key_heads of them."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    # the projections of the inputs have q, k, v and gates of each key head side by side
    grouped: bool = False
    rule: Literal["delta", "mamba2"] = "delta"
    conv_bias: bool = False

    @property
    def channels(self) -> int:
        """The convolution's inputs of a token: q, k and v."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def numbers(self) -> int:
        """Numbers of one request's state, without the convolution's inputs."""
        return self.value_heads * self.key_dim * self.value_dim

    def __str__(self) -> str:
        return f"state of {self.value_heads} heads x {self.key_dim} x {self.value_dim}"


@dataclass(frozen=True, slots=True)
class FeedForward:
    """A layer kind: a feed-forward block alone, which keeps nothing. Where there are such layers, those that
    attend or keep a state have none beside it (Nemotron-H)."""

    def __str__(self) -> str:
        return "a feed-forward block"


@dataclass(frozen=True, slots=True)
class KVReader:
    """A layer kind: attention that stores nothing. It reads what another layer has stored, whose number
    among the layers that attend is `source`. `kind`: the source's, with the reader's own query heads."""

    kind: Attention
    source: int

    def __str__(self) -> str:
        return f"{self.kind}, stored by another layer"


# what a layer keeps between two steps, and of which tokens. Equal kinds share a store
LayerKind = Attention | KVReader | Recurrent | FeedForward


def attention_kinds(layers: Iterable[LayerKind]) -> list[Attention]:
    """The layers that store something for each token."""
    return [kind for kind in layers if isinstance(kind, Attention)]


def attending(layers: Iterable[LayerKind]) -> list[Attention | KVReader]:
    """The layers that attend, those among them that store nothing too."""
    return [kind for kind in layers if isinstance(kind, Attention | KVReader)]


def recurrent_kinds(layers: Iterable[LayerKind]) -> list[Recurrent]:
    """The layers that keep a state for each request."""
    return [kind for kind in layers if isinstance(kind, Recurrent)]


def page_groups(layers: Iterable[LayerKind]) -> tuple[int | None, ...]:
    """Layers that hold as many tokens share their pages: the windows, each once. Full attention, None, comes
    first where there is any; the entries of compressed tokens are in its pages."""
    kinds = attention_kinds(layers)
    full_windows = [None for kind in kinds if kind.compressed is not None]
    return tuple(sorted({*full_windows, *(kind.kv_window for kind in kinds)}, key=lambda window: window or 0))


def tokens_of_entries(layers: Iterable[LayerKind]) -> int:
    """Pages begin and end where entries do: of a multiple of so many tokens."""
    return lcm(*(kind.compressed.every for kind in attention_kinds(layers) if kind.compressed is not None))


@dataclass(frozen=True, slots=True)
class MoEArch:
    """`scores` sigmoid is DeepSeek-V3's routing: the best groups, then top_k of their experts. With softmax
    over all experts, or with DeepSeek-V4's root of a softplus, there are no groups."""

    experts: int
    top_k: int
    size: int  # intermediate size of one expert
    shared: int  # intermediate size of the shared expert, which is computed for every token; 0: there is none
    dense: tuple[int, ...]  # layers without experts
    groups: int
    top_groups: int
    scale: float
    renormalise: bool
    scores: Literal["sigmoid", "softmax", "sqrtsoftplus"] = "sigmoid"
    # added to the scores for the choice alone, or to what they are made of
    router_bias: Literal["choice", "logits"] | None = "choice"
    biases: bool = False  # the experts' projections have biases
    gate: ClampedGate | Ungated | None = None  # the routed experts' activation; None: silu(gate) * up
    beside: ClampedGate | Ungated | None = None  # the shared expert's activation
    # the routed experts get that many numbers, projected from the hidden ones, and so does their sum; 0: the
    # hidden ones
    latent: int = 0
    # layers in which a table says which experts each token has, and the router only their weights
    by_token: tuple[int, ...] = ()
    # the shared expert's output is multiplied with the sigmoid of a number of its own
    shared_gate: bool = False
    zero_experts: int = 0  # further experts, with the numbers after those, that give their own input
    by_rank: bool = False  # each of several ranks has some experts whole; otherwise a part of each


@dataclass(frozen=True, slots=True)
class MTPArch:
    """How families' MTP layers differ."""

    layers: int
    # The order of the two halves of the fusing projection's input; sum: a projection for each, added for each
    # stream.
    fusion: Literal["embedding-hidden", "hidden-embedding", "sum"]
    hidden_in: Norm  # the trunk's hidden state before or after its final norm
    # The next draft step gets the layer's own output before or after its final norm. None: it gets what the
    # first one gets of the trunk, by a layer of its own.
    recycle: Norm | None
    norm: Literal["own", "trunk"] = "own"  # its final norm
    head: Literal["own", "trunk"] = "trunk"  # the language-model head after it
    each_depth: bool = False  # each draft step has a layer of its own, see layers.decoder.MTPModules

    @property
    def chained(self) -> bool:
        """Each of several layers gets the output of the one before it."""
        return self.each_depth and self.recycle is not None and self.layers > 1


@dataclass(frozen=True, slots=True)
class Features:
    """The trunk's outputs that a draft model gets, concatenated for each row. By default none. The trunk
    gives each row its own."""

    taps: tuple[int, ...] = ()  # the outputs of these layers
    last: Norm | None = None  # the last layer's output, before or after the final norm
    rows: int = 1  # the row's own, those of the row before it, and so on, side by side
    # features of earlier rows are outputs of the draft model's own modules (core.protocols.models.DraftModel)
    chained: bool = False
    # pages keep those of their last token, for a request that continues after it
    has_boundary: bool = True

    def boundary_width(self, hidden: int, streams: int = 1) -> int:
        """Numbers that a page keeps."""
        return self.width(hidden, streams) if self.has_boundary else 0

    def width(self, hidden: int, streams: int = 1) -> int:
        """What comes before the final norm has as many numbers for each of the residual `streams`."""
        num_features = streams * (len(self.taps) + (self.last == "pre")) + (self.last == "post")
        return hidden * num_features * self.rows


@dataclass(frozen=True, slots=True)
class DraftArch:
    """A draft model that is published apart from the trunk, and is no MTP layer: a head, or a whole model."""

    kind: str  # for people
    layers: tuple[LayerKind, ...]  # its own
    features: Features = field(default_factory=Features)  # that it gets of the trunk
    scale: float = 1.0  # factor of its attention scores
    own_head: bool = False  # it has a language-model head of its own


@dataclass(frozen=True, slots=True)
class ModelArch:
    family: str  # the name in models/registry
    layers: tuple[LayerKind, ...]  # the trunk's, then the draft model's where there is one
    hidden: int
    vocab: int
    heads: int
    head_dim: int  # numbers of q and k per head
    intermediate: int
    rope: RopeArch
    norm_eps: float
    scale: float  # factor of the attention scores
    max_positions: int
    tied_head: bool
    eos_ids: tuple[int, ...]
    dtype: str  # the checkpoint's own: bfloat16, float16 or float32
    mla: MLAArch | None = None
    shared_kv: SharedKVArch | None = None
    indexer: IndexerArch | None = None
    moe: MoEArch | None = None
    mtp: MTPArch | None = None
    draft: DraftArch | None = None  # where the draft model is no MTP layer
    streams: StreamsArch | None = None  # None: one, to which blocks add
    qkv_bias: bool = False
    out_bias: bool = False  # the attention's output projection has a bias
    head_norms: bool = False  # each head of q and k is normed before it is rotated
    row_norms: bool = False  # q and k are, each over all of its heads
    # what a head has attended to is multiplied by the sigmoid of numbers that the projection of q gives after
    # q
    out_gate: bool = False
    head_gate: bool = False  # the same, by one number for each head from a projection of its own
    gates: tuple[LayerGates | None, ...] = ()  # by layer; None, or an empty tuple: those of `moe`
    window_rope: RopeArch | None = None  # for layers with a window; None: `rope`
    value_scale: float = 1.0  # values are multiplied with it
    # layers whose heads have a sink, see core.protocols.attention.Context
    sinks: Literal["all", "windows"] | None = None
    gate: Ungated | GeluGate | None = None  # of blocks without experts; None: silu(gate) * up
    embed_scale: float | None = None  # rows of the embedding are multiplied with it; None: by nothing
    logit_cap: float | None = None  # logits become cap * tanh(logits / cap)
    sandwich: SandwichArch | None = None  # blocks are normed before and after

    def heads_of(self, kind: Attention) -> int:
        """Query heads of a layer kind."""
        return kind.heads or self.heads

    def attention(self, layer: int) -> Attention:
        """The kind of a layer that attends."""
        kind = self.layers[layer]
        assert isinstance(kind, Attention)
        return kind

    @property
    def residual(self) -> int:
        """Numbers of a row between two layers."""
        return self.hidden * (1 if self.streams is None else self.streams.number)

    @property
    def num_layers(self) -> int:
        """Layers of the trunk."""
        return self.shared_layers - (self.mtp.layers if self.mtp else 0)

    @property
    def shared_layers(self) -> int:
        """How many of the layers, the first ones, ranks share. What was published apart is computed by
        each."""
        return len(self.layers) - (len(self.draft.layers) if self.draft else 0)

    @property
    def drafts(self) -> bool:
        """There is a draft model."""
        return self.mtp is not None or self.draft is not None

    @property
    def features(self) -> Features:
        """That the draft model gets of the trunk."""
        if self.draft is not None:
            return self.draft.features
        return (
            Features()
            if self.mtp is None
            else Features(last=self.mtp.hidden_in, rows=self.mtp.layers, chained=self.mtp.chained)
        )

    @property
    def own_draft_head(self) -> bool:
        """The draft model does not share the trunk's language-model head."""
        return (
            self.draft.own_head if self.draft is not None else self.mtp is not None and self.mtp.head == "own"
        )

    @property
    def feed_forwards(self) -> list[int]:
        """Numbers of the trunk's layers with a feed-forward block."""
        trunk = self.layers[: self.num_layers]
        alone = [number for number, kind in enumerate(trunk) if isinstance(kind, FeedForward)]
        return alone or list(range(len(trunk)))

    @property
    def summary(self) -> str:
        """The model in one line, for logs."""
        mtp = (
            "no MTP layer"
            if self.mtp is None
            else "an MTP layer"
            if self.mtp.layers == 1
            else f"{self.mtp.layers} MTP layers"
        )
        mtp = mtp if self.draft is None else self.draft.kind
        return (
            f"{self.family} with {self.num_layers} layers of {self.hidden}, {self.heads} heads, a "
            f"vocabulary of {self.vocab}, {mtp}"
        )
