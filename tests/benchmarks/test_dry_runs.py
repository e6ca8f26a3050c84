"""Benchmarks that are rarely run, or need a GPU, must not fail on the day when they are wanted: here they run at toy size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.models.checkpoints import mimo

ROOT = Path(__file__).parents[2]


@pytest.mark.thorough  # test_traces_of_depths takes the same load, with fewer engines
def test_depths_that_are_chosen_side_by_side(tmp_path: Path) -> None:
    command = ["never_slower.py", "--models", "demo", "--requests", "1", "--temperatures", "0.8", "--turns", "2"]
    output([*command, "--json", str(tmp_path / "out.json")])
    (row,) = json.loads((tmp_path / "out.json").read_text())["numbers"]["rows"]
    assert 0 < row["least"] <= row["most"] and row["against_plain"] > 0 and row["accept_length"] > 1.3 and sum(row["depths"]) > 10


@pytest.mark.thorough
def test_traces_of_depths(tmp_path: Path) -> None:
    command = ["depth_traces.py", "--model", "demo", "--requests", "2", "--turns", "1", "--turn-seconds", "0.05"]
    output([*command, "--out", str(tmp_path / "out.json")])
    parts = json.loads((tmp_path / "out.json").read_text())["parts"]
    assert len(parts) == 3 and all(len(part["microseconds"]) == 4 and all(turn for (turn,) in part["microseconds"]) for part in parts)


@pytest.mark.thorough  # two servers that are started one after the other
def test_servers_side_by_side(tmp_path: Path) -> None:
    """Of the engines only ours: the others are not installed where tests run."""
    command = ["peers/cpu.py", "--size", "toy", "--minutes", "0.01", "--models", "small", "--modes", "plain,mtp", "--concurrency", "2"]
    command += ["--rounds", "1", "--waves", "1", "--tokens", "8", "--checkpoints", str(tmp_path), "--json", str(tmp_path / "out.json")]
    output(command)
    numbers = json.loads((tmp_path / "out.json").read_text())["numbers"]
    plain, mtp = numbers["medians"]
    assert numbers["losses"] == numbers["skipped"] == []
    assert (plain["mode"], mtp["mode"]) == ("plain", "mtp")
    assert plain["same_text"] == mtp["same_text"] == 1.0, "drafts change the text"
    assert plain["accept_length"] is None
    # The depth is chosen while it serves: where the machine is busy, so few tokens may all come without drafts.
    assert mtp["accept_length"] is None or 1 <= mtp["accept_length"] <= 4
    assert all(row["tokens_per_s"] > 0 and row["ttft_ms"] > 0 and row["client_share"] > 0 for row in (plain, mtp))
    assert all(row["least_ttft_ms"] == row["ttft_ms"] == row["most_ttft_ms"] for row in (plain, mtp)), "one round has no spread"
    assert all(0 < start["health_s"] <= start["first_completion_s"] for start in numbers["starts"])


@pytest.mark.thorough
def test_rollouts_of_a_policy_that_learns(tmp_path: Path) -> None:
    """Each step's rollouts are plain decoding's, by the very weights that the trainer has pushed."""
    output(["rollouts.py", "--dry-run", "--json", str(tmp_path / "out.json"), "--plot", str(tmp_path / "out.svg")])
    numbers = json.loads((tmp_path / "out.json").read_text())["numbers"]
    assert numbers["weight_versions"] == ["2", "2"] and [row["step"] for row in numbers["steps"]] == [0, 1]
    assert all(row["logprob_difference"] < 1e-3 and 0 < row["reward"] < 1 for row in numbers["steps"])
    assert len(numbers["arms"]) == 4 and all(row["same_text"] == 1 and row["against_plain"] > 0 for row in numbers["arms"])
    assert find_spec("matplotlib") is None or (tmp_path / "out.svg").stat().st_size > 1000


def test_gpus_on_paper(tmp_path: Path) -> None:
    """The published gains lie between what is waited for and what is hidden, and nothing is sent or computed for nothing."""
    output(["scale_model.py", "--json", str(tmp_path / "out.json")])
    rows = json.loads((tmp_path / "out.json").read_text())["numbers"]["steps"]
    waited, hidden, few = [row for row in rows if row["drafts"] == 1 and row["plain_ms"] > 20]
    assert waited["speed_up"] < 1.142 < hidden["speed_up"] < few["speed_up"]
    for row in rows:
        parts = [value for name, value in row.items() if name.endswith("_ms") and not name.startswith("plain") and name != "step_ms"]
        assert all(part > 0 for part in parts) and sum(parts) == pytest.approx(row["step_ms"], abs=0.05)
        assert 1 < row["step_over_plain"] < 2 and row["speed_up"] < row["acceptance_length"]


@pytest.mark.thorough
def test_pages_travel_by_each_way_that_is_there(tmp_path: Path) -> None:
    output(["handover.py", "--pages", "9", "--kib", "4", "--rounds", "2", "--json", str(tmp_path / "out.json")])
    numbers = json.loads((tmp_path / "out.json").read_text())["numbers"]
    assert numbers["bytes"] == 9 * 4096 and [row["way"] for row in numbers["rows"]][:2] == ["shm", "tcp"]
    assert all(0 < row["least_ms"] <= row["ms"] for row in numbers["rows"])


@pytest.mark.thorough  # two engines
def test_adapters(tmp_path: Path) -> None:
    made = mimo(tmp_path / "base")
    command = ["lora.py", "--model", str(made.directory), "--dry-run", "--requests", "3", "--adapters", "0", "2", "--ranks", "4"]
    output([*command, "--json", str(tmp_path / "out.json")])
    rows = json.loads((tmp_path / "out.json").read_text())["numbers"]["rows"]
    assert [(row["drafts"], row["adapters"]) for row in rows] == [(0, 0), (0, 2), (3, 0), (3, 2)]
    assert all(row["ms"] > 0 and row["over_none"] > 0 for row in rows)


def output(command: list[str]) -> str:
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "kernels")))
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / command[0]), *command[1:]],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
