"""The seams. A layer is handed an object of one of these kinds and never asks which."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence as Seq
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from mtpserve.core.arch import KVLayout, ModelArch
from mtpserve.core.batch import Batch, Drafts, Hidden, Verdict, Want
from mtpserve.core.draft_sizes import DraftSizes
from mtpserve.core.plan import StepPlan, StepResult
from mtpserve.core.request import EngineStats, ModelCard, Request, TokenEvent
from mtpserve.core.sampling import GrammarSpec

if TYPE_CHECKING:
    from numpy import ndarray
    from torch import Tensor, nn


class Attend(Protocol):
    """Attention for one planned batch: store this step's k and v in layer `layer` of the pool, attend, return [T, heads, value_dim].

    q [T, heads, key_dim], k [T, kv_heads, key_dim], v [T, kv_heads, value_dim]; for the latent layout v is None.
    """

    def __call__(self, q: Tensor, k: Tensor, v: Tensor | None, layer: int) -> Tensor: ...


class PagedAttend(Attend, Protocol):
    """One that lets the kernel that rotates k store it too."""

    slots: Tensor  # [T], where the rows are stored

    def caches(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer [slots, heads, dim]; the latent layout's values are a part of its keys."""
        ...

    def stored(self, q: Tensor, layer: int) -> Tensor:
        """As a call, after k and v were stored."""
        ...


class AttentionBackend(Protocol):
    graph_safe: bool

    def supports(self, layout: KVLayout, device: str) -> bool: ...

    def plan(self, batch: Batch) -> Attend:
        """Index work, once per batch; the result serves all layers."""
        ...


class LinearMethod(Protocol):
    """How a linear layer's weights are stored and multiplied."""

    def finish(self, module: nn.Module) -> None:
        """After loading: pack or convert `module.weight` in place."""
        ...

    def apply(self, module: nn.Module, x: Tensor) -> Tensor: ...

    def rows(self, module: nn.Module, ids: Tensor) -> Tensor:
        """A copy of the weight's rows `ids` [n], as numbers [n, inputs]; after `finish`."""
        ...


class CausalModel(Protocol):
    """A family's trunk and MTP head. Rows of all requests are one dimension; attention alone knows whose they are."""

    arch: ModelArch

    def trunk(self, ids: Tensor, positions: Tensor, attend: Attend) -> Hidden: ...

    def mtp(self, ids: Tensor, positions: Tensor, hidden: Tensor, attend: Attend) -> Hidden:
        """Row p: `hidden` of position p and the id of token p+1; its output predicts token p+2."""
        ...

    def logits(self, head: Tensor) -> Tensor:
        """[rows, hidden] → [rows, vocabulary] float32."""
        ...


class Seats(Protocol):
    """The tensors that a step changes, one row per running request."""

    tokens: Tensor  # [seats, max_len + lookahead] int64: committed tokens, then the waiting drafts
    length: Tensor  # [seats] int64: committed tokens
    computed: Tensor  # [seats] int64: tokens whose KV is in the pages
    page_table: Tensor  # [seats, pages] int64
    draft_probs: Tensor  # [seats, K, vocabulary] float32: what the waiting drafts of a chain were drawn from

    def slots(self, seat_ids: Tensor, index: Tensor) -> Tensor:
        """Where the KV of token `index` of each seat's request lies in the pool."""
        ...

    def prompt_length(self, seat_ids: Tensor) -> Tensor: ...

    def prediction(self, seat_ids: Tensor) -> tuple[Tensor, Tensor] | None:
        """What each request's output probably repeats [rows, longest] int64, and its length [rows], 0 where there is none. None:
        nowhere is one."""
        ...


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
    """Logits to tokens, by what each request of the batch asks for.

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
        """Some request of the batch asks for more than temperature, top_k, top_p and min_p: `processed` needs paths."""
        ...

    @property
    def top_logprobs(self) -> int | None:
        """The largest number of alternatives whose log-probabilities are asked for; None: nobody asks for any."""
        ...

    @property
    def parameters(self) -> SeatParameters: ...

    def greedy(self, seat_ids: Tensor) -> Tensor:
        """[rows] bool"""
        ...

    def coupled(self, seat_ids: Tensor) -> Tensor | None:
        """[rows] bool: requests whose drafts are point masses. None: nobody's."""
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


class Grammar(Protocol):
    """What one request's output must look like: a state over its tokens."""

    def commit(self, tokens: Seq[int]) -> None:
        """The output grew. Raises ValueError for tokens that are not allowed."""
        ...

    def masks(self, paths: Seq[Seq[int]], rows: ndarray[Any, Any]) -> list[bool]:
        """What may follow each path after the output: bit j of word i of its row is token 32 i + j. rows [n, words] int32.

        False for a path that is itself not allowed; its row is then all ones.
        """
        ...

    def forced(self, path: Seq[int], limit: int) -> list[int]:
        """The tokens after `path` about which there is no choice, at most `limit`."""
        ...


class GrammarCompiler(Protocol):
    def compile(self, spec: GrammarSpec) -> Grammar:
        """Raises InvalidRequest."""
        ...


class LogitsProcessor(Protocol):
    """A class of the operator's own, named at launch. Called for every row whose logits decide something."""

    def __call__(self, tokens: list[int], prompt_len: int, params: Mapping[str, object], logits: Tensor) -> Tensor:
        """`tokens` are prompt, output and the drafts that lead here; `params` the request's custom_params; logits [vocabulary]
        float32 → the same. An exception ends the request, not the engine."""
        ...


class Drafter(Protocol):
    """Proposes what the next step verifies. Wanting nothing still absorbs the rows, so that the draft layer's KV stays aligned."""

    sizes: DraftSizes
    coupled: bool  # drafts are point masses, for all requests
    graph_safe: bool  # `draft` reads nothing on the host, for requests with neither grammar nor prediction

    def draft(self, batch: Batch, hidden: Hidden, verdict: Verdict, want: Want) -> Drafts | None:
        """Called after the seats were advanced by the verdict and the surviving rows moved together. `want` speaks of the spans in
        `batch.draft_spans`. None when nobody wants anything."""
        ...


class Launched(Protocol):
    """A step on its way."""

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

    def launch(self, plan: StepPlan) -> Launched:
        """Start one step, after those that were started before. A request that cannot be seated has an error in its span's result, and
        in those of all its later spans; any other fault is raised here, or by `result`."""
        ...


class EngineClient(Protocol):
    """The engine as the server sees it, in this process or another."""

    card: ModelCard

    def submit(self, request: Request) -> AsyncIterator[TokenEvent]:
        """Events until one has `finish`. Closing the iterator early aborts the request. Raises EngineBusy or EngineDead."""
        ...

    def abort(self, request_id: str) -> None: ...

    @property
    def dead(self) -> str | None:
        """None while the engine lives, else one line of why it does not."""
        ...

    def stats(self) -> EngineStats: ...
