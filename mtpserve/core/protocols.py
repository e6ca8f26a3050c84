"""The seams. A layer is handed an object of one of these kinds and never asks what is behind it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence as Seq
from typing import TYPE_CHECKING, Protocol

from mtpserve.core.arch import KVLayout, ModelArch
from mtpserve.core.batch import Batch, Drafts, Hidden, Span, StepResult, Verdict
from mtpserve.core.request import EngineStats, ModelCard, Request, TokenEvent
from mtpserve.core.sequence import Sequence

if TYPE_CHECKING:
    from torch import Tensor, nn


class Attend(Protocol):
    """Attention for one planned batch: store this step's k and v in layer `layer` of the pool, attend, return [T, heads, value_dim].

    q [T, heads, key_dim], k [T, kv_heads, key_dim], v [T, kv_heads, value_dim]; for the latent layout v is None.
    """

    def __call__(self, q: Tensor, k: Tensor, v: Tensor | None, layer: int) -> Tensor: ...


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

    tokens: Tensor  # [seats, max_len + slack] int64: committed tokens, then the waiting drafts
    length: Tensor  # [seats] int64: committed tokens
    computed: Tensor  # [seats] int64: tokens whose KV is in the pages
    page_table: Tensor  # [seats, pages] int64
    draft_probs: Tensor  # [seats, K, vocabulary] float32: what the waiting drafts were drawn from

    def slots(self, seat_ids: Tensor, index: Tensor) -> Tensor:
        """Where the KV of token `index` of each seat's request lies in the pool."""
        ...


class Sampler(Protocol):
    """Logits to tokens, with the batch's own sampling parameters."""

    @property
    def all_greedy(self) -> bool: ...

    def probs(self, logits: Tensor, seat_ids: Tensor) -> Tensor:
        """[rows, vocabulary] → the transformed distribution of each row's request, float32; greedy rows are one-hot."""
        ...

    def uniform(self, seat_ids: Tensor, index: Tensor) -> Tensor:
        """[rows], [rows, n] → [rows, n, 3] in [0, 1), float64, from (the request's seed, the token's index, the stream) alone."""
        ...


class Drafter(Protocol):
    """Proposes what the next step verifies. `want` 0 still absorbs the rows, so that the draft layer's KV stays aligned."""

    max_drafts: int

    def draft(self, batch: Batch, hidden: Hidden, verdict: Verdict, want: int) -> Drafts | None:
        """Called after the seats were advanced by the verdict. None when want is 0."""
        ...


class ModelRunner(Protocol):
    """The device side of the engine. Tests of the scheduler bring a fake one without tensors."""

    @property
    def max_drafts(self) -> int: ...

    def admit(self, seq: Sequence) -> None:
        """The sequence has been given a seat (`seq.seat`): upload its tokens and sampling parameters."""
        ...

    def step(self, spans: Seq[Span], want: int) -> StepResult:
        """Run one step; `want` is the number of drafts to propose for the next one."""
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
