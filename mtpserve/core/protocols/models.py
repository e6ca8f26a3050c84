"""The trunk, the models that draft for it, and a drafter."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Protocol

from mtpserve.core.arch.model import Features, LayerKind, ModelArch
from mtpserve.core.batch import Batch, Drafts, Hidden, VerifyOutput
from mtpserve.core.protocols.attention import Context
from mtpserve.core.spec_sizes import SpecSizes

if TYPE_CHECKING:
    from torch import Tensor


class Trunk(Protocol):
    """A model without its drafters. Rows of all requests are one dimension; only attention knows which
    request they belong to."""

    arch: ModelArch

    def trunk(self, ids: Tensor, positions: Tensor, contexts: Seq[Context], features: Features) -> Hidden:
        """`contexts`: one for each of its layers."""
        ...

    def logits(self, head: Tensor) -> Tensor:
        """[rows, hidden] → [rows, vocabulary] float32."""
        ...


class DraftModel(Protocol):
    """A model that proposes tokens: an MTP layer, an EAGLE head, a small model of its own. Its row with slot
    s knows token s. It is handed one context for each of its layers.

    lag 1 (MTP, EAGLE)     row s - 1 joins the trunk's features of token s - 1 with token s; its position is
                           s - 1; slot 0 has no row
    lag 0 (a small model)  row s has token s alone; its position is s

    With features of K rows (Features.rows) its layers are K modules, and draft i + 1 comes from module i: its
    row with slot s joins the features of token s - 1 - i with token s, stands at position s - 1 - i, and sees
    those of its rows that stand before it. Where they are chained, module i + 1 gets in slot s what module i
    gave in slot s - 1: see ChainedModules.
    """

    lag: int
    at_once: bool  # one pass gives all drafts (Medusa's heads, DFlash's block), and `step` needs no contexts
    # a block's mask: the token that stands for each draft in its pass, where rows see each other; None: no
    # block
    mask: int | None
    features: Features  # what `extend` is fed with
    layers: tuple[LayerKind, ...]  # its own, stored in the same pages after the trunk's
    tokens: Tensor | None  # [n] ascending, for which its `logits` are; None: the whole vocabulary

    def extend(
        self, ids: Tensor, positions: Tensor, features: Tensor | None, contexts: Seq[Context]
    ) -> Hidden:
        """Rows [T] of what is committed, features [T, Features.width] of the trunk."""
        ...

    def store_kv(
        self, ids: Tensor, positions: Tensor, features: Tensor | None, contexts: Seq[Context]
    ) -> None:
        """Compute only what later rows need of these rows: their keys and values."""
        ...

    def step(self, ids: Tensor, positions: Tensor, state: Tensor | None, contexts: Seq[Context]) -> Hidden:
        """Rows of its own drafts; `state` is the features of its own output for the row before. Of modules,
        those of the trunk that are known for the modules that are left: each pass has one less. At once: what
        is left of the state, for the next draft."""
        ...

    def logits(self, head: Tensor, depth: int) -> Tensor:
        """[rows, hidden] of drafts before which there are `depth` others → [rows, vocabulary] float32."""
        ...


class BlockModel(DraftModel, Protocol):
    """A draft model with `mask`. It stores only keys and values of committed tokens, by `store_kv`."""

    causal: tuple[bool, ...]  # by layer: a block's rows see only earlier rows of it, not all

    def block(self, ids: Tensor, positions: Tensor, contexts: Seq[Context]) -> Hidden:
        """[D, rows], the last token and a mask for each draft → the output for the first, as features what
        `step` makes the others of."""


class ChainedModules(DraftModel, Protocol):
    """A draft model with Features.chained. The caller knows the order of rows, and calls one module after
    the other."""

    def module(
        self, number: int, ids: Tensor, positions: Tensor, features: Tensor, contexts: Seq[Context]
    ) -> Hidden:
        """features [T, hidden]: the trunk's for module 0, for others those that the module before gave for
        the row before each."""
        ...

    def store_last_kv(self, ids: Tensor, positions: Tensor, features: Tensor, contexts: Seq[Context]) -> None:
        """Compute only what later rows need of the last module: nobody reads its output."""
        ...


class DraftSource(Protocol):
    """The source of a drafter's model: an entry of config.drafters names one."""

    def in_checkpoint(self, path: str | None) -> bool:
        """True for the checkpoint's own MTP layer, or one that is published apart in the same layout. `path`:
        the draft model's."""
        ...

    def build(self, trunk: Trunk) -> DraftModel:
        """The draft model that was loaded together with the trunk."""


class Drafter(Protocol):
    """Proposes what the next step verifies. Rows are absorbed also where nothing is wanted, at once or in a
    later step, so that the draft model's KV stays aligned."""

    sizes: SpecSizes
    coupled: bool  # drafts are point masses, for all requests
    graph_safe: bool  # `draft` reads nothing on the host, for requests with neither grammar nor prediction

    @property
    def features(self) -> Features:
        """That it wants of the trunk's rows."""
        ...

    @property
    def lag(self) -> int | None:
        """The draft model's lag; None: there is no draft model."""
        ...

    def draft(self, batch: Batch, hidden: Hidden, verify_output: VerifyOutput) -> Drafts | None:
        """Called after the seats were advanced by the verdict and the surviving rows moved together.
        The fields of `batch` say how deep. None when no request wants any."""
        ...

    def store_deferred_kv(self, batch: Batch) -> None:
        """Absorb rows whose step has deferred that. Each span has the last rows of its request that were
        computed."""
        ...
