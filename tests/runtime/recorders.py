"""Stand-ins for the recorder of CUDA graphs: what they record is called again. One of them sees to it that nothing is read on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mtpserve.attention.contexts import Contexts
from mtpserve.cache.pool import KVPool
from mtpserve.cache.stores import Stores
from mtpserve.core.arch.model import LayerKind
from mtpserve.core.batch import Batch
from mtpserve.core.protocols.attention import Context
from mtpserve.engine.engine import Engine
from mtpserve.runtime.graphs.capture import Body
from mtpserve.runtime.graphs.graph_key import GraphOutput
from mtpserve.runtime.runner import Runner


def runner_of(engine: Engine) -> Runner:
    runner = engine.runner
    assert isinstance(runner, Runner)
    return runner


def draft_one_by_one(engine: Engine) -> None:
    """Its draft model's passes can be replaced then: where one call makes all drafts, nothing else is called."""
    drafter: Any = runner_of(engine).drafter
    getattr(drafter, "base", drafter).passes.draft_chain = None


def tensors_of(output: GraphOutput) -> list[Tensor]:
    logprobs = output.logprobs
    scores = () if logprobs is None else (logprobs.token_logprobs, logprobs.ranks, logprobs.top_ids, logprobs.top)
    return [tensor for tensor in (output.table, output.num_proposals, *scores) if tensor is not None]


class Again:
    """Replays by running the body again into the tensors of the first run, as a captured graph would."""

    def __init__(self) -> None:
        self.recordings = 0
        self.replayed: list[int] = []  # requests of each replay, padding counted

    def capture(self, body: Body) -> tuple[GraphOutput, Callable[[], object]]:
        output = body()
        self.recordings += 1

        def again() -> None:
            self.replayed.append(len(output.table))
            for tensor, fresh in zip(tensors_of(output), tensors_of(self.repeat(body)), strict=True):
                tensor.copy_(fresh)

        return output, again

    def repeat(self, body: Body) -> GraphOutput:
        return body()


class Watched(Again):
    """Every run might be the one that is captured, so none may read on the host."""

    def repeat(self, body: Body) -> GraphOutput:
        with nothing_is_read():
            return body()


METHODS = (
    "tolist", "item", "numpy", "cpu", "__array__", "__index__", "__int__", "__bool__", "__float__", "__complex__", "__contains__",
    "nonzero", "argwhere", "unique", "unique_consecutive", "masked_select", "bincount", "equal", "allclose", "is_nonzero",
)  # fmt: skip


class HostRead(AssertionError):
    pass


class NoReading(TorchDispatchMode):
    """Operators that make the host wait, that copy from pageable host memory, or whose shapes depend on numbers."""

    FORBIDDEN = (
        "_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "item", "lift_fresh", "equal", "bincount", "histc",
        "_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive",
    )  # fmt: skip

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, _, overload = function.name().split("::")[-1].partition(".")
        if name in self.FORBIDDEN or (name, overload) == ("repeat_interleave", "Tensor"):
            raise HostRead(f"a captured step would call {function.name()}")
        for index in args[1] if name in ("index", "index_put", "index_put_", "_index_put_impl_") else ():
            if index is not None and index.dtype in (torch.bool, torch.uint8):
                raise HostRead("a mask as an index has a shape that depends on numbers")
        return function(*args, **(kwargs or {}))


@contextmanager
def nothing_is_read() -> Iterator[None]:
    """Dispatched operators, and what never gets there on a CPU: methods that read numbers, lists as indices, numbers assigned to elements
    (a copy from the host, on a GPU)."""

    def forbidden(name: str) -> Callable[..., Any]:
        def read(*_: Any, **__: Any) -> Any:
            raise HostRead(f"a captured step would call Tensor.{name}")

        return read

    get, put = torch.Tensor.__getitem__, torch.Tensor.__setitem__

    def no_lists(key: Any) -> None:
        if any(isinstance(part, list) for part in (key if isinstance(key, tuple) else (key,))):
            raise HostRead("a list as an index is copied from the host")

    def checked_get(self: torch.Tensor, key: Any) -> Any:
        no_lists(key)
        return get(self, key)

    def checked_put(self: torch.Tensor, key: Any, value: Any) -> None:
        no_lists(key)
        if not isinstance(value, torch.Tensor):
            raise HostRead("a number that is assigned to elements is copied from the host")
        put(self, key, value)

    with ExitStack() as stack:
        for name in METHODS:
            stack.enter_context(patch.object(torch.Tensor, name, forbidden(name)))
        stack.enter_context(patch.object(torch.Tensor, "__getitem__", checked_get))
        stack.enter_context(patch.object(torch.Tensor, "__setitem__", checked_put))
        stack.enter_context(NoReading())
        yield


class Blind:
    """core.protocols.AttentionBackend that attends to nothing."""

    graph_safe = True

    def __init__(self, stores: Stores) -> None:
        self.stores = stores

    def supports(self, kind: LayerKind) -> bool:
        return True

    def plan(self, batch: Batch) -> Sequence[Context]:
        return Contexts(self.stores, [BlindPlan(store.pool, batch.slot_mapping) for store in self.stores.stores])


@dataclass(frozen=True)
class BlindPlan:
    pool: KVPool
    slots: torch.Tensor

    def attend(self, q: torch.Tensor, layer: int, sinks: torch.Tensor | None) -> torch.Tensor:
        return q[..., : self.pool.layout.value_dim].contiguous()


def blinded(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Runner:
    """Attention and the moving of paths read on the host in plain torch, and their kernels do not: stand-ins take their places."""
    runner = runner_of(engine)
    runner.step.attention = Blind(runner.step.attention.stores)  # type: ignore[attr-defined]
    for store in runner.step.stores.stores:
        monkeypatch.setattr(store.pool, "_compact", lambda pool, source, target: None)
    base = getattr(runner.drafter, "base", runner.drafter)
    if hasattr(base, "passes"):
        for part in filter(None, (base.passes, base.passes.chain)):
            monkeypatch.setattr(part, "attention", Blind(part.attention.stores))
    return runner
