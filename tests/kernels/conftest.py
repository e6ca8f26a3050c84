"""Kernels are interpreted where there is no GPU (see tests/conftest.py), and run natively where there is one."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    from tests.kernels.interpreter import quicken

    quicken()


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def poisoned(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel is handed to write to is full of NaN, or of absurd integers: a number that it forgets is seen."""
    if request.module.__name__.endswith(("test_engine", "test_launches")):
        return  # there the poisoned KV pool does it
    empty, empty_like = torch.empty, torch.empty_like

    def filled(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.fill_(torch.nan if tensor.is_floating_point() else -(1 << 30) if tensor.itemsize >= 4 else 0)

    monkeypatch.setattr(torch, "empty", lambda *sizes, **options: filled(empty(*sizes, **options)))
    monkeypatch.setattr(torch, "empty_like", lambda *given, **options: filled(empty_like(*given, **options)))
