"""Programmatic dependent launch: which chips and settings have it. tests/kernels/matrix.py looks for its instructions."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from mtpserve_kernels import dependent_launch, tuned
from mtpserve_kernels.fused.norm import add_rms_norm
from mtpserve_kernels.fused.rope import rope_store
from mtpserve_kernels.fused.silu import silu_mul
from torch import Tensor

HEADS, KV_HEADS, DIM = 24, 4, 128
ALLOCATORS = {"empty": torch.empty, "empty_like": torch.empty_like}  # before tests/kernels/conftest.py replaces them


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where kernels are not interpreted, on an H100."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.delenv(dependent_launch.DISABLE, raising=False)
    monkeypatch.setattr(tuned, "chip_of", lambda device: "sm_90")


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(
    ("chip", "expected"), [("sm_75", False), ("sm_80", False), ("sm_90", True), ("sm_100", True), ("sm_120", True), (None, False)]
)
def test_chips(chip: str | None, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuned, "chip_of", lambda device: chip)
    assert dependent_launch.enabled(torch.device("cuda")) is expected


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(("value", "expected"), [("", True), ("0", True), ("1", False)])
def test_the_environment_turns_it_off(value: str, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(dependent_launch.DISABLE, value)
    assert dependent_launch.enabled(torch.device("cuda")) is expected


@pytest.mark.usefixtures("compiled")
def test_another_value_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(dependent_launch.DISABLE, "yes")
    with pytest.raises(ValueError, match=r"^MTPSERVE_DISABLE_PDL=yes: 0 or 1 is accepted$"):
        dependent_launch.enabled(torch.device("cuda"))


@pytest.mark.usefixtures("compiled")
def test_the_interpreter_has_no_such_instruction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert not dependent_launch.enabled(torch.device("cuda"))


@dataclass(frozen=True, slots=True)
class Chain:
    """20 times silu, two norms, rotation and storing: each reads what the one before wrote, and writes to memory that earlier ones read."""

    x: Tensor  # [rows, hidden]
    weight: Tensor  # [hidden]
    positions: Tensor  # [rows]
    cos: Tensor  # [rows, DIM / 2]
    sin: Tensor

    @classmethod
    def random(cls, rows: int, device: torch.device) -> Chain:
        generator, hidden = torch.Generator().manual_seed(1), (HEADS + 2 * KV_HEADS) * DIM
        shapes = (rows, hidden), (hidden,), (rows, DIM // 2), (rows, DIM // 2)
        x, weight, *tables = (torch.randn(shape, generator=generator).to(device) for shape in shapes)
        return cls(x, weight, torch.arange(rows).to(device), *tables)

    def run(self) -> Tensor:
        x, residual = self.x, self.x
        for _ in range(20):
            cache = x.new_zeros(2, len(x), KV_HEADS, DIM)
            x, residual = add_rms_norm(silu_mul(torch.cat([x, x], 1)), residual, self.weight, 1e-6)
            x, residual = add_rms_norm(x, residual, self.weight, 1e-6)
            q = rope_store(x.unflatten(1, (-1, DIM)), self.positions, self.cos, self.sin, self.positions, cache[0], cache[1], HEADS)
            x = torch.cat([q.flatten(1), cache.transpose(0, 1).flatten(1)], 1)
            x = add_rms_norm(x, None, self.weight, 1e-6)[0]
        return torch.cat([x, residual], 1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="overlaps launches of a GPU")
@pytest.mark.parametrize("rows", [1, 700])
def test_a_chain_gives_the_same_without(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, function in ALLOCATORS.items():  # nothing is filled with NaN: that would be a launch between two of the chain's
        monkeypatch.setattr(torch, name, function)
    kernels, graph = Chain.random(rows, torch.device("cuda")), torch.cuda.CUDAGraph()
    early = [kernels.run() for _ in range(3)]
    with torch.cuda.graph(graph):
        captured = kernels.run()
    for _ in range(3):
        graph.replay()
    monkeypatch.setenv(dependent_launch.DISABLE, "1")
    expected = kernels.run()
    assert expected.isfinite().all() and all(torch.equal(out, expected) for out in (*early, captured))
