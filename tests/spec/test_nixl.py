"""Pages by NIXL. A fake one stands for it, which reads memory of this process."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from mtpserve.core.errors import ConfigError
from tests.spec.nodes import PROMPT, ask, computed_here, drain, node, prefilled, single, source
from tests.spec.test_prefix_cache import facts
from tests.tiny import tiny_model


class FakeNixl:
    """NIXL's interface between engines of one process."""

    def __init__(self, fails: bool = False) -> None:
        self.fails, self.read = fails, 0
        self.agents: dict[bytes, list[tuple[int, int, int, str]]] = {}

    def nixl_agent_config(self, backends: list[str]) -> list[str]:
        return backends

    def nixl_agent(self, name: str, config: list[str]) -> FakeAgent:
        assert config == ["UCX"]
        return FakeAgent(self, name)


class FakeAgent:
    def __init__(self, nixl: FakeNixl, name: str) -> None:
        self.nixl, self.name = nixl, name

    def register_memory(self, regions: list[tuple[int, int, int, str]], kind: str) -> None:
        self.nixl.agents[self.name.encode()] = regions

    def get_agent_metadata(self) -> bytes:
        return self.name.encode()

    def add_remote_agent(self, metadata: bytes) -> str:
        assert metadata in self.nixl.agents
        return metadata.decode()

    def get_xfer_descs(self, places: list[tuple[int, int, int]], kind: str) -> list[tuple[int, int, int]]:
        return places

    def initialize_xfer(self, way: str, here: Any, there: Any, agent: str) -> Any:
        if self.nixl.fails:
            raise RuntimeError("NIXL_ERR_BACKEND")
        for places, name in ((here, self.name), (there, agent)):
            regions = self.nixl.agents[name.encode()]
            assert all(any(start <= at and at + size <= start + whole for start, whole, *_ in regions) for at, size, _ in places)
        return list(zip(here, there, strict=True))

    def transfer(self, handle: Any) -> str:
        for (to, size, _), (at, _, _) in handle:
            ctypes.memmove(to, at, size)
        self.nixl.read += len(handle)
        return "PROC"

    def check_xfer_state(self, handle: Any) -> str:
        return "DONE"

    def release_xfer_handle(self, handle: Any) -> None:
        pass


def test_by_nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, model, way = FakeNixl(), tiny_model("mimo", window=10), {"disaggregation_transfer_backend": "nixl"}
    monkeypatch.setattr("mtpserve.runtime.remote.nixl._api", lambda: fake)
    prefill, decode = node("prefill", model, **way), node("decode", model, **way)
    ask(decode, "d", PROMPT, source=source(prefilled(prefill, PROMPT)), temperature=0.0)
    events = drain(decode)["d"]
    assert (
        facts(events) == facts(single(model, "chain", PROMPT, temperature=0.0)) and sum(event.num_cached_tokens for event in events) == 36
    )
    assert fake.read == decode.stats.transfers_total["pull"] > 9
    other = node("prefill", model)
    ask(decode, "e", PROMPT[::-1], source=source(prefilled(other, PROMPT[::-1])), temperature=0.0)
    assert sum(event.num_cached_tokens for event in drain(decode)["e"]) == 36, "from a node without it, by TCP"
    fake.fails = True
    decode = node("decode", model, **way)
    computed_here(decode, model, source(prefilled(prefill, PROMPT, name="again")), "broken")


def test_nixl_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtpserve.runtime.remote.nixl.MODULES", ("there_is_no_such_module",))
    with pytest.raises(ConfigError, match="backend nixl needs NIXL: pip install nixl-cu12"):
        node("decode", tiny_model(), disaggregation_transfer_backend="nixl")
