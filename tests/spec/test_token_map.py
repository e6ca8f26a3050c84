"""Token maps: which tokens are in, and files that are none."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from mtpserve.core.errors import ConfigError, LoadError
from mtpserve.spec.draft.token_map import count_tokens, make_token_map, read_token_map


def test_the_most_frequent_and_always_the_special_ones() -> None:
    made = make_token_map(Counter({4: 10, 7: 5, 2: 5, 9: 1}), 4, 12, always={11, 30})
    assert made.tokens == [2, 4, 7, 11]
    assert (made.counted, made.distinct) == (21, 4)
    assert dict(made.coverage)[4] == 20 / 21


def test_unseen_tokens_fill_it_in_order() -> None:
    assert make_token_map(Counter({5: 1}), 4, 12, always=()).tokens == [0, 1, 2, 5]


@pytest.mark.parametrize("size", [1, 13])
def test_a_size_that_cannot_be(size: int) -> None:
    with pytest.raises(ConfigError, match=rf"--token-map-size must be in \[2, 12\].* got {size}"):
        make_token_map(Counter({5: 1}), size, 12, always={1, 2})


def test_texts_that_cannot_be_counted(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no tokens to count"):
        make_token_map(Counter(), 2, 12, always=())
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe")
    for name, wanted in (("none.txt", "cannot be read"), ("bad.txt", "is not UTF-8")):
        with pytest.raises(ConfigError, match=f"{name}: {wanted}"):
            count_tokens(lambda text: [], [tmp_path / name])


def test_four_ways_to_write_one(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("[3, 1, 2]")
    (tmp_path / "b.json").write_text('{"tokens": [2, 3, 1], "more": 1}')
    np.save(tmp_path / "c.npy", np.array([1, 3, 2]))
    save_file({"tokens": np.array([1, 2, 3])}, tmp_path / "d.safetensors")
    assert [read_token_map(file, 4) for file in sorted(tmp_path.iterdir())] == [[1, 2, 3]] * 4


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("[1, 2", "is not a token map: Expecting.*mtpserve inspect --token-map"),
        ("[]", "has no tokens"),
        ("3", "must hold a list of token ids"),
        ('{"ids": [1]}', "must hold a list of token ids"),
        ("[1, 2.5]", "must hold a list of token ids"),
        ("[true]", "must hold a list of token ids"),
        ("[1, 4]", r"token ids must be in \[0, 3\].* got 4"),
        ("[-1]", r"token ids must be in \[0, 3\].* got -1"),
        ("[1, 2, 1]", "token 1 is listed 2 times"),
    ],
)
def test_files_that_are_none(tmp_path: Path, text: str, wanted: str) -> None:
    file = tmp_path / "map.json"
    file.write_text(text)
    with pytest.raises(LoadError, match=f"map.json: {wanted}"):
        read_token_map(file, 4)


def test_pickles_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "freq.pt").write_bytes(b"x")
    with pytest.raises(LoadError, match=r"freq.pt: is a pickle.*make one with: mtpserve inspect --token-map"):
        read_token_map(tmp_path / "freq.pt", 4)
    np.save(tmp_path / "objects.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(LoadError, match="is not a token map"):
        read_token_map(tmp_path / "objects.npy", 4)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"none\.json: cannot be read: No such file"):
        read_token_map(tmp_path / "none.json", 4)


def test_what_is_written_is_json(tmp_path: Path) -> None:
    made = make_token_map(Counter({4: 3, 5: 1}), 2, 12, always=())
    made.write(tmp_path / "map.json")
    assert json.loads((tmp_path / "map.json").read_text())["coverage"]["1"] == 0.75
    with pytest.raises(ConfigError, match="cannot be written"):
        made.write(tmp_path / "no" / "map.json")
