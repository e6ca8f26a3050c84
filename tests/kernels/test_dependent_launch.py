"""Programmatic dependent launch: which chips and settings have it. tests/kernels/matrix.py looks for its instructions."""

from __future__ import annotations

import pytest
import torch
from mtpserve_kernels import dependent_launch, tuned


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where kernels are not interpreted, on an H100."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.delenv(dependent_launch.DISABLE, raising=False)
    monkeypatch.setattr(tuned, "chip_of", lambda device: "sm_90")


@pytest.mark.parametrize(
    ("chip", "expected"), [("sm_75", False), ("sm_80", False), ("sm_90", True), ("sm_100", True), ("sm_120", True), (None, False)]
)
def test_chips(chip: str | None, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuned, "chip_of", lambda device: chip)
    assert dependent_launch.enabled(torch.device("cuda")) is expected


@pytest.mark.parametrize(("value", "expected"), [("", True), ("0", True), ("1", False)])
def test_the_environment_turns_it_off(value: str, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(dependent_launch.DISABLE, value)
    assert dependent_launch.enabled(torch.device("cuda")) is expected


def test_another_value_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(dependent_launch.DISABLE, "yes")
    with pytest.raises(ValueError, match=r"^MTPSERVE_DISABLE_PDL=yes: 0 or 1 is accepted$"):
        dependent_launch.enabled(torch.device("cuda"))


def test_the_interpreter_has_no_such_instruction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert not dependent_launch.enabled(torch.device("cuda"))
