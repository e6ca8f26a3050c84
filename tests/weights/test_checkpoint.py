from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mtpserve.core.errors import LoadError
from mtpserve.weights.checkpoint.checkpoint import INDEX, Checkpoint
from tests.weights.toys import write

A, B = {"a": torch.arange(6.0).view(2, 3), "empty": torch.zeros(0, 2)}, {"b": torch.ones(4, dtype=torch.bfloat16), "s": torch.tensor(2.0)}


def refused(directory: Path, *words: str) -> None:
    with pytest.raises(LoadError) as error:
        Checkpoint.open(directory)
    message = str(error.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


def raw(path: Path, header: object, data: bytes = b"") -> None:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def entry(start: int, end: int, shape: list[int] | None = None, dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": [(end - start) // 4] if shape is None else shape, "data_offsets": [start, end]}


@pytest.mark.parametrize("shards", [[A | B], [A, B]], ids=["one file", "index"])
def test_headers_then_tensors(tmp_path: Path, shards: list[dict[str, torch.Tensor]]) -> None:
    checkpoint = Checkpoint.open(write(tmp_path, *shards))
    assert set(checkpoint.tensors) == {"a", "empty", "b", "s"}
    assert checkpoint.tensors["a"].shape == (2, 3) and checkpoint.tensors["a"].dtype == "F32"
    assert checkpoint.tensors["b"].dtype == "BF16" and checkpoint.tensors["b"].size == 8
    for name, value in (A | B).items():
        assert torch.equal(checkpoint.tensor(name), value)
    checkpoint.close()
    assert torch.equal(checkpoint.tensor("a"), A["a"])


def test_any_file_name_will_do_without_an_index(tmp_path: Path) -> None:
    save_file(A, tmp_path / "nextn_layer_parameters.safetensors")
    assert set(Checkpoint.open(tmp_path).tensors) == set(A)


def test_one_tensor_in_two_files_without_an_index(tmp_path: Path) -> None:
    save_file(A, tmp_path / "x.safetensors")
    save_file(A, tmp_path / "y.safetensors")
    refused(tmp_path, "y.safetensors", "a is also in x.safetensors")


def test_no_directory(tmp_path: Path) -> None:
    refused(tmp_path / "absent", "absent: no such directory")


def test_nothing_in_the_directory(tmp_path: Path) -> None:
    refused(tmp_path, "no *.safetensors file")


def test_pickles_are_refused(tmp_path: Path) -> None:
    marker = tmp_path / "it ran"
    (tmp_path / "pytorch_model.bin").write_bytes(f"cposix\nmkdir\n(S{str(marker)!r}\ntR.".encode())
    refused(tmp_path, "pickled weights", "pytorch_model.bin", "safetensors")
    assert not marker.exists()


def test_a_missing_shard_is_named_with_a_tensor(tmp_path: Path) -> None:
    write(tmp_path, A, B)
    (tmp_path / "model-1.safetensors").unlink()
    refused(tmp_path, "model-1.safetensors: this file is missing", "for b and 1 other")


def test_the_index_names_a_tensor_that_the_shard_lacks(tmp_path: Path) -> None:
    write(tmp_path, A, B)
    save_file({"b": B["b"]}, tmp_path / "model-1.safetensors")
    refused(tmp_path, "model-1.safetensors: s is missing in this file")


def test_the_index_says_which_of_two_counts(tmp_path: Path) -> None:
    write(tmp_path, A, B)
    save_file(B | {"a": torch.zeros(1)}, tmp_path / "model-1.safetensors")
    assert Checkpoint.open(tmp_path).tensors["a"].shape == (2, 3)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', "{"])
def test_a_broken_index(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX).write_text(text)
    refused(tmp_path, INDEX, "is not an index")


def test_an_index_that_leaves_the_directory(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "../x.safetensors"}}))
    refused(tmp_path, "'../x.safetensors', which is not a file name")


@pytest.mark.parametrize("left", [0, 5, 8, 40, -100, -1])
def test_truncated_anywhere(tmp_path: Path, left: int) -> None:
    path = write(tmp_path, {"a": torch.randn(64)}) / "model.safetensors"
    path.write_bytes(path.read_bytes()[: left if left >= 0 else path.stat().st_size + left])
    refused(tmp_path, "model.safetensors: is", "truncated")


def test_a_truncated_file_is_named_with_its_first_cut_tensor(tmp_path: Path) -> None:
    path = write(tmp_path, {"a": torch.randn(64), "b": torch.randn(64)}) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    refused(tmp_path, "is truncated: b ends at byte 512", "only 504")


def test_trailing_bytes(tmp_path: Path) -> None:
    path = write(tmp_path, A) / "model.safetensors"
    path.write_bytes(path.read_bytes() + b"\0" * 3)
    refused(tmp_path, "3 bytes follow")


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n", "git lfs pull"),
        (b"<!DOCTYPE html><html><body>404</body></html>", "web page"),
        (b"\n  <html>", "web page"),
        (b"garbage, and some more of it", "is not a safetensors file"),
        ((20).to_bytes(8, "little") + b"{not json at all....", "not valid JSON"),
        ((2).to_bytes(8, "little") + b"[]", "not a JSON object"),
        ((2**62).to_bytes(8, "little") + b"{}", "is not a safetensors file"),
    ],
)
def test_something_else_under_the_name(tmp_path: Path, content: bytes, word: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    refused(tmp_path, "model.safetensors", word)


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ({"a": 3}, ["a has a damaged header entry"]),
        ({"a": entry(0, 8) | {"shape": [-1]}}, ["a has a damaged header entry"]),
        ({"a": entry(0, 8) | {"data_offsets": [0]}}, ["a has a damaged header entry"]),
        ({"a": entry(0, 8, dtype="Q4")}, ["unknown dtype 'Q4'", "BF16"]),
        ({"a": entry(0, 8, [3])}, ["a of shape [3] and dtype F32 cannot take 8 bytes"]),
        ({"a": entry(0, 8, [2**40, 2**40])}, ["cannot take 8 bytes"]),
        ({"a": entry(0, 8), "b": entry(4, 8)}, ["b starts at byte 4", "ends at 8"]),
        ({"a": entry(0, 4), "b": entry(8, 12)}, ["b starts at byte 8", "ends at 4"]),
    ],
)
def test_headers_that_do_not_add_up(tmp_path: Path, header: object, words: list[str]) -> None:
    raw(tmp_path / "model.safetensors", header, b"\0" * 8)
    refused(tmp_path, *words)


def test_metadata_is_no_tensor(tmp_path: Path) -> None:
    raw(tmp_path / "model.safetensors", {"__metadata__": {"format": "pt"}, "a": entry(0, 8)}, b"\0" * 8)
    assert set(Checkpoint.open(tmp_path).tensors) == {"a"}
