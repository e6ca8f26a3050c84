"""`mtpserve experts`, and the files that it reads and makes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mtpserve.cli.main import main
from mtpserve.core.errors import ConfigError
from mtpserve.runtime.parallel.placement import ExpertPlacement, balanced, imbalance, in_order, read_owners


def test_loads_are_added_up_and_experts_placed_by_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [tmp_path / f"load.{number}" for number in range(2)]
    files[0].write_text(json.dumps({"1": [90, 50, 0, 0], "2": [1, 1, 1, 1]}))
    files[1].write_text(json.dumps({"1": [0, 10, 40, 30], "2": [1, 1, 1, 1]}))
    made = tmp_path / "map.json"
    assert main(["experts", *map(str, files), "--engines", "2", "--output", str(made)]) == 0
    owners = read_owners(str(made), 2, {1: 4, 2: 4, 3: 4})
    assert owners[1] == [0, 1, 1, 0] and sorted(owners[2]) == [0, 0, 1, 1]
    layer, *_, mean = capsys.readouterr().out.splitlines()[1:]
    assert layer.split() == ["1", "220", "1.36", "1.09"] and mean.split() == ["mean", "1.18", "1.05"]


def test_every_engine_has_as_many_experts_as_in_order() -> None:
    for experts, size in ((8, 2), (9, 4), (256, 8)):
        load = [(7 * expert) ** 3 % 101 for expert in range(experts)]
        owners = balanced(load, size)
        assert [owners.count(rank) for rank in range(size)] == [in_order(experts, size).count(rank) for rank in range(size)]
        assert imbalance(load, owners, size) <= imbalance(load, in_order(experts, size), size)
    places = ExpertPlacement(1, 2, {3: [1, 0, 1, 1]})
    assert places.owned(3, 4) == [0, 2, 3] and places.places(3, 4) == [(1, 0), (0, 0), (1, 1), (1, 2)] and places.owned(4, 4) == [2, 3]


def test_experts_of_an_engines_ranks() -> None:
    """Each rank asks those of its own number; between them they ask for every expert once."""
    seen = [ExpertPlacement(engine, 2, {3: [3, 0, 1, 2, 3, 2]}, rank, 2) for engine in range(2) for rank in range(2)]
    assert [each.owned(3, 6) for each in seen] == [[1], [2], [3, 5], [0, 4]]
    assert seen[0].places(3, 6) == seen[2].places(3, 6) == [(-1, 0), (0, 0), (-1, 0), (1, 0), (-1, 1), (1, 1)]
    assert seen[1].places(3, 6) == seen[3].places(3, 6) == [(1, 0), (-1, 0), (0, 0), (-1, 0), (1, 1), (-1, 1)]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("[]", "must be a JSON object"),
        ("{", "Expecting"),
        ('{"9": [0, 1]}', "'9' is not the number of a layer with experts"),
        ('{"1": [0, 1, 2, 0]}', r"layer 1 must have 4 numbers of EP ranks in \[0, 1\]"),
        ('{"1": [0, 1, 0]}', "layer 1 must have 4 numbers"),
        ('{"1": [0, 0, 0, 0]}', "in layer 1 EP rank 1 has no expert"),
    ],
)
def test_what_is_no_map(tmp_path: Path, text: str, error: str) -> None:
    file = tmp_path / "map.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=error):
        read_owners(str(file), 2, {1: 4})


def test_what_is_no_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text, engines, error in (('{"1": 3}', "2", "must be a JSON object"), ('{"1": [1, 2]}', "3", "--engines must be in [2, 2]")):
        file = tmp_path / "load.0"
        file.write_text(text)
        assert main(["experts", str(file), "--engines", engines, "--output", str(tmp_path / "map")]) == 2
        assert error in capsys.readouterr().err
