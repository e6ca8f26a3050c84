"""The seams: a layer is given an object of one of these kinds, and works with any."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence as Seq
from typing import TYPE_CHECKING, NamedTuple, Protocol

from mtpserve.core.arch import Features, LayerKind, ModelArch
from mtpserve.core.batch import Batch, Drafts, Hidden, Verdict, Want
from mtpserve.core.draft_sizes import DraftShape, DraftSizes
from mtpserve.core.plan import StepPlan, StepResult

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


class Context(Protocol):
    """What a layer is handed of a planned batch: where its rows are stored, and attention over what its requests have stored.

    The layer first stores its rows' keys and values in `slots`, and then attends.
    """

    @property
    def slots(self) -> Tensor:
        """[T], where the rows are stored."""
        ...

    @property
    def keys(self) -> Tensor:
        """The layer's own [slots, kv_heads, key_dim]."""
        ...

    @property
    def values(self) -> Tensor:
        """[slots, kv_heads, value_dim]; the latent layout's are a part of its keys."""
        ...

    def attend(self, q: Tensor, sinks: Tensor | None = None) -> Tensor:
        """[T, heads, key_dim] → [T, heads, value_dim]. sinks [heads] float32: one more score for each row, which takes its part of the
        softmax and has no value (https://arxiv.org/abs/2309.17453 §3.3)."""
        ...


class RecurrentContext(Protocol):
    """What a layer that keeps a state is handed of a planned batch."""

    def recur(self, inputs: Tensor, gates: Tensor, conv: Tensor, skip: Tensor | None = None) -> Tensor:
        """inputs [T, channels], gates [T, 2, value_heads] float32 (the logarithm of the decay, and the share of the value that is written),
        conv [taps, channels] float32 → [T, value_heads, value_dim]; of Mamba-2 also a bias and skip: see
        mtpserve_kernels.recurrent.reference. Called once for each step."""
        ...


class AttentionBackend(Protocol):
    graph_safe: bool
    exact: bool  # a row's numbers do not depend on the other rows, and neither do those of the layers' kernels that belong to it

    def supports(self, kind: LayerKind) -> bool: ...

    def plan(self, batch: Batch) -> Seq[Context]:
        """Index work, once per batch and store: one context per layer, in the order of the layers. A RecurrentContext for a layer that
        keeps a state, and any for one that keeps nothing."""
        ...


class Packed(Protocol):
    """A matrix W [N, K] and its bias in the form that a kernel multiplies."""

    def __call__(self, x: Tensor, dtype: torch.dtype, /) -> Tensor:
        """x [T, K] → x W^T + b [T, N] of `dtype`."""
        ...

    def rows(self, ids: Tensor, /) -> Tensor:
        """A copy of W's rows `ids` [n] → [n, K]."""
        ...


class Pack(Protocol):
    def __call__(self, weight: Tensor, bias: Tensor | None, lookups: bool, /) -> Packed | None:
        """weight [N, K], bias [N]; None: torch multiplies the weight as it is. May reorder the weight's own memory, which nobody else
        reads afterwards. `lookups`: every step reads single rows, too."""
        ...


class PackInt8(Protocol):
    def __call__(self, weight: Tensor, scale: Tensor, bias: Tensor | None, /) -> Packed:
        """weight [N, K] int8, scale [N], bias [N]. A product rounds each row of x to int8, too. May reorder the weight's memory."""
        ...


class LinearKernels(Protocol):
    """The kernels that linear methods use."""

    @property
    def pack(self) -> Pack: ...

    @property
    def pack_int8(self) -> PackInt8: ...

    @property
    def linear(self) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]: ...  # x [T, K], weight [N, K], bias [N] → x W^T + bias

    @property
    def linear_stored(self) -> LinearStored: ...


class LinearStored(Protocol):
    def __call__(self, x: Tensor, weight: Tensor, scale: Tensor, zeros: Tensor | None, bias: Tensor | None, /) -> Tensor:
        """x [T, K], bias [N] → [T, N]: x W^T + bias. The matrix is float8 [N, K] with scales [N / 128, K / 128] rounded up, or float8 or
        integers of four bits [N, K / 2] with scales and zeros [N, groups]: see quant/stored.py."""
        ...


class LinearMethod(Protocol):
    """How a linear layer's weights are stored and multiplied."""

    def finish(self, module: nn.Module, lookups: bool = False) -> None:
        """After loading: pack or convert `module.weight`. `lookups`: every step reads single rows, too."""
        ...

    def apply(self, module: nn.Module, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """x [T, inputs] → [T, outputs] of `dtype`, by default x's."""
        ...

    def rows(self, module: nn.Module, ids: Tensor) -> Tensor:
        """A copy of the weight's rows `ids` [n], as numbers [n, inputs], float32 where they are stored in fewer bits than the model
        computes with; after `finish`."""
        ...


class Trunk(Protocol):
    """A model without its drafters. Rows of all requests are one dimension; only attention knows which request they belong to."""

    arch: ModelArch

    def trunk(self, ids: Tensor, positions: Tensor, contexts: Seq[Context], features: Features) -> Hidden:
        """`contexts`: one for each of its layers."""
        ...

    def logits(self, head: Tensor) -> Tensor:
        """[rows, hidden] → [rows, vocabulary] float32."""
        ...


class DraftModel(Protocol):
    """A model that proposes tokens: an MTP layer, an EAGLE head, a small model of its own. Its row with slot s knows token s.
    It is handed one context for each of its layers.

    lag 1 (MTP, EAGLE)     row s - 1 joins the trunk's features of token s - 1 with token s; its position is s - 1; slot 0 has no row
    lag 0 (a small model)  row s has token s alone; its position is s

    With features of K rows (Features.rows) its layers are K modules, and draft i + 1 comes from module i: its row with slot s joins the
    features of token s - 1 - i with token s, stands at position s - 1 - i, and sees those of its rows that stand before it. Where they are
    chained, module i + 1 gets in slot s what module i gave in slot s - 1: see ChainedModules.
    """

    lag: int
    at_once: bool  # one pass gives all drafts (Medusa's heads, DFlash's block), and `step` needs no contexts
    mask: int | None  # of a block: the token that stands for each draft in that pass, whose rows see each other; None: there is none
    features: Features  # what `absorb` is fed with
    layers: tuple[LayerKind, ...]  # its own, stored in the same pages after the trunk's
    tokens: Tensor | None  # [n] ascending, for which its `logits` are; None: the whole vocabulary

    def absorb(self, ids: Tensor, positions: Tensor, features: Tensor | None, contexts: Seq[Context]) -> Hidden:
        """Rows [T] of what is committed, features [T, Features.width] of the trunk."""
        ...

    def fill(self, ids: Tensor, positions: Tensor, features: Tensor | None, contexts: Seq[Context]) -> None:
        """As `absorb`, for what later rows need of these: their keys and values."""
        ...

    def step(self, ids: Tensor, positions: Tensor, state: Tensor | None, contexts: Seq[Context]) -> Hidden:
        """Rows of its own drafts; `state` is the features of its own output for the row before. Of modules, those of the trunk that are
        known for the modules that are left: each pass has one less. At once: what is left of the state, for the next draft."""
        ...

    def logits(self, head: Tensor, depth: int) -> Tensor:
        """[rows, hidden] of drafts before which there are `depth` others → [rows, vocabulary] float32."""
        ...


class BlockModel(DraftModel, Protocol):
    """With `mask`: of what is committed it has keys and values alone, by `fill`."""

    causal: tuple[bool, ...]  # of each layer: a block's rows see only those before them, and not all of them

    def block(self, ids: Tensor, positions: Tensor, contexts: Seq[Context]) -> Hidden:
        """[D, rows], the last token and a mask for each draft → the output for the first, as features what `step` makes the others of."""


class ChainedModules(DraftModel, Protocol):
    """With Features.chained: who calls it knows which row is before which, so that it calls one module after the other."""

    def module(self, number: int, ids: Tensor, positions: Tensor, features: Tensor, contexts: Seq[Context]) -> Hidden:
        """features [T, hidden]: the trunk's for module 0, for others those that the module before gave for the row before each."""
        ...

    def fill_last(self, ids: Tensor, positions: Tensor, features: Tensor, contexts: Seq[Context]) -> None:
        """As `module`, for what later rows need of the last one's: nobody gets its output."""
        ...


class DraftSource(Protocol):
    """Where a drafter's model comes from: what an entry of core.drafters names."""

    def in_checkpoint(self, path: str | None) -> bool:
        """Whether it is the checkpoint's own MTP layer, or one that was published apart in the same layout. `path`: of the draft model."""
        ...

    def build(self, trunk: Trunk) -> DraftModel:
        """The draft model that was loaded together with the trunk."""


class Seats(Protocol):
    """The tensors that a step changes, one row per running request."""

    tokens: Tensor  # [seats, max_len + lookahead] int64: committed tokens, then the waiting drafts
    length: Tensor  # [seats] int64: committed tokens
    computed: Tensor  # [seats] int64: tokens whose KV is in the pages
    page_tables: Tensor  # [groups, seats, columns] int64, see core.arch.page_groups
    spare_slots: list[int]  # of each group: a slot that is never read
    draft_probs: Tensor  # [seats, K, vocabulary] float32: what the waiting drafts of a chain were drawn from

    def slots(self, seat_ids: Tensor, index: Tensor, group: int = 0) -> Tensor:
        """Where the KV of token `index` of each seat's request is stored, in the pages of this group."""
        ...

    def following(self, seat_ids: Tensor, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of the token after each `index` [n] of these seats' requests [n]: which one it is, its index, and its slot in the pages of
        group 0; [n] each."""
        ...

    def prompt_length(self, seat_ids: Tensor) -> Tensor: ...


class SeatParameters(NamedTuple):
    """What the sampling kernels read, each [seats]; and whether any request of the batch uses the cut at all."""

    temperature: Tensor  # float32, 0 is greedy
    top_k: Tensor  # int64, 0 is off
    top_p: Tensor  # float32
    min_p: Tensor  # float32
    seed: Tensor  # int64
    coupled: Tensor  # bool
    any_top_k: bool
    any_top_p: bool
    any_min_p: bool


class Sampler(Protocol):
    """Logits to tokens, by the parameters of each request of the batch.

    A `path` is the tokens after the committed ones where a row's logits come from: the drafts that lead to its node.
    """

    @property
    def all_greedy(self) -> bool: ...

    @property
    def all_coupled(self) -> bool:
        """All drafts are point masses, so that the target's own choice decides: see spec/accept."""
        ...

    @property
    def has_rules(self) -> bool:
        """Some request of the batch has more parameters than temperature, top_k, top_p and min_p: `processed` needs paths."""
        ...

    @property
    def top_logprobs(self) -> int | None:
        """The largest number of alternatives whose log-probabilities a request wants; None: no request wants any."""
        ...

    @property
    def parameters(self) -> SeatParameters: ...

    def greedy(self, seat_ids: Tensor) -> Tensor:
        """[rows] bool"""
        ...

    def coupled(self, seat_ids: Tensor) -> Tensor | None:
        """[rows] bool: requests whose drafts are point masses. None: no request's."""
        ...

    def processed(self, logits: Tensor, seat_ids: Tensor, path: Tensor, count: Tensor) -> Tensor:
        """[rows, vocabulary], path [rows, D] of which the first `count` [rows] count → logits after everything but temperature,
        top_k, top_p and min_p."""
        ...

    def probs(self, logits: Tensor, seat_ids: Tensor) -> Tensor:
        """Processed logits → the distribution of each row's request, float32; greedy rows are one-hot."""
        ...

    def uniform(self, seat_ids: Tensor, index: Tensor, stream: int) -> Tensor:
        """[rows], [rows, n] → [rows, n] in [0, 1), float64, from (the request's seed, the token's index, the stream) alone."""
        ...

    def choose(self, weights: Tensor, seat_ids: Tensor, index: Tensor, stream: int) -> Tensor:
        """weights [rows, vocabulary] ≥ 0, index [rows] → [rows], a token drawn in proportion: the one with the largest `race`."""
        ...

    def race(self, weights: Tensor, seat_ids: Tensor, index: Tensor, stream: int) -> Tensor:
        """[rows, vocabulary] float64: weights over exponential noise that (seed, index, stream, token) alone decide."""
        ...

    def forced(self, limit: int, seat_ids: Tensor) -> tuple[Tensor, Tensor] | None:
        """Tokens that grammars leave no choice about, after what is committed now: [rows, limit] and how many [rows]."""
        ...

    def advance(self, batch: Batch, verdict: Verdict) -> None:
        """A verdict was committed."""
        ...


class LogitsProcessor(Protocol):
    """A class of the operator's own, named at launch. Called for every row whose logits decide something."""

    def __call__(self, tokens: list[int], prompt_len: int, params: Mapping[str, object], logits: Tensor) -> Tensor:
        """`tokens` are prompt, output and the drafts that lead here; `params` the request's custom_params; logits [vocabulary]
        float32 → the same. An exception ends the request, not the engine."""
        ...


class Drafter(Protocol):
    """Proposes what the next step verifies. Rows are absorbed also where nothing is wanted, at once or in a later step, so that the draft
    model's KV stays aligned."""

    sizes: DraftSizes
    coupled: bool  # drafts are point masses, for all requests
    graph_safe: bool  # `draft` reads nothing on the host, for requests with neither grammar nor prediction

    @property
    def features(self) -> Features:
        """That it wants of the trunk's rows."""
        ...

    @property
    def lag(self) -> int | None:
        """Of its draft model; None: it has none."""
        ...

    def draft(self, batch: Batch, hidden: Hidden, verdict: Verdict, want: Want) -> Drafts | None:
        """Called after the seats were advanced by the verdict and the surviving rows moved together. `want` speaks of the spans in
        `batch.draft_spans`. None when no request wants any."""
        ...

    def catch_up(self, batch: Batch) -> None:
        """Absorb rows whose step has deferred that. Each span has the last rows of its request that were computed."""
        ...


class StepEnd(Protocol):
    """A moment on a device."""

    def seconds_after(self, before: StepEnd) -> float | None:
        """None: one of them may still be to come."""
        ...


class Launched(Protocol):
    """A step on its way."""

    @property
    def ended(self) -> StepEnd | None:
        """Its end as the device has it, which is certainly over when a later step has been read. None: it ends when it can be read."""
        ...

    def result(self) -> StepResult:
        """Waits for it. Raises what went wrong in it."""
        ...


class ModelRunner(Protocol):
    """The device side of the engine. Tests of the scheduler bring a fake one without tensors."""

    @property
    def sizes(self) -> DraftSizes: ...

    @property
    def processors(self) -> bool:
        """The operator's own processors run between steps: each step of a request must have been read before its next is launched."""
        ...

    def reshape(self, shape: DraftShape) -> None:
        """While nothing runs: `sizes` are this shape's from now on. Raises ConfigError for more than it was built with."""
        ...

    def launch(self, plan: StepPlan) -> Launched:
        """Start one step, after those that were started before. A request that cannot be seated has an error in its span's result, and
        in those of all its later spans; any other fault is raised here, or by `result`."""
        ...

    def check(self) -> None:
        """While nothing runs. Raises EngineDead where a process that computes a part of the model has ended."""
        ...

    def close(self) -> None:
        """Nothing is called any more."""
        ...
