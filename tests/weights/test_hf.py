from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mtpserve.core.errors import LoadError
from mtpserve.weights.checkpoint.hf import dtype, eos_ids, quantization, read_config
from mtpserve.weights.checkpoint.hf_config import HFConfig


def config(directory: Path, values: object, generation: object = None) -> HFConfig:
    (directory / "config.json").write_text(json.dumps(values))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return read_config(directory)


def test_values_come_in_the_type_that_was_asked_for(tmp_path: Path) -> None:
    found = config(tmp_path, {"i": 3, "f": 2, "s": "x", "b": False, "none": None, "text_config": {"t": 5}})
    assert found.get_int("i") == 3 and type(found.get_float("f")) is float
    assert found.get_str("s", one_of=("x", "y")) == "x" and found.get_bool("b") is False
    assert found.get_int("absent", 7) == 7 and found.get_int("none", None) is None and found.get_bool("absent", True) is True
    assert found.section("text_config").get_int("t") == 5 and found.get_int("t") == 5 and found.section("absent").values == {}
    assert found.raw("text_config") == {"t": 5} and found.raw("absent") is None


@pytest.mark.parametrize(
    ("getter", "arguments", "value", "message"),
    [
        ("get_int", {}, None, "key is missing; it must be an integer"),
        ("get_int", {}, "8", 'key must be an integer, got "8"'),
        ("get_int", {}, 8.5, "key must be an integer, got 8.5"),
        ("get_int", {}, True, "key must be an integer, got true"),
        ("get_int", {"at_least": 1}, 0, "key must be an integer of at least 1, got 0"),
        ("get_float", {}, [1], "key must be a number, got [1]"),
        ("get_float", {}, float("nan"), "key must be a number, got NaN"),
        ("get_float", {"above": 0}, 0.0, "key must be a number above 0, got 0.0"),
        ("get_str", {}, 3, "key must be a string, got 3"),
        ("get_str", {"one_of": ("silu", "gelu")}, "relu", 'key must be one of silu, gelu, got "relu"'),
        ("get_bool", {}, 1, "key must be true or false, got 1"),
        ("section", {}, [], "key must be an object, got []"),
    ],
)
def test_errors_name_file_key_value_and_what_would_do(
    tmp_path: Path, getter: str, arguments: dict[str, Any], value: object, message: str
) -> None:
    found = config(tmp_path, {"key": value})
    with pytest.raises(LoadError) as error:
        getattr(found, getter)("key", **arguments)
    assert str(error.value) == f"{tmp_path / 'config.json'}: {message}"


def test_a_sections_errors_have_its_name(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"config\.json: text_config\.layers must be an integer"):
        config(tmp_path, {"text_config": {"layers": "x"}}).section("text_config").get_int("layers")


@pytest.mark.parametrize(("text", "message"), [("{", "not valid JSON"), ("[]", "must hold a JSON object"), ("\xff", "not valid JSON")])
def test_files_that_are_no_config(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(LoadError, match=message):
        read_config(tmp_path)


def test_no_config_and_no_directory(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"no config\.json in this directory"):
        read_config(tmp_path)
    with pytest.raises(LoadError, match="absent: no such directory"):
        read_config(tmp_path / "absent")


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "float16"}, "float16"),
        ({"dtype": "bfloat16", "torch_dtype": "float32"}, "bfloat16"),
        ({"torch_dtype": "torch.float32"}, "float32"),
        ({}, "float32"),
    ],
)
def test_dtype_under_both_names(tmp_path: Path, values: dict[str, str], wanted: str) -> None:
    assert dtype(config(tmp_path, values)) == wanted


def test_an_unknown_dtype(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match='torch_dtype must be one of bfloat16, float16, float32, got "int8"'):
        dtype(config(tmp_path, {"torch_dtype": "int8"}))


@pytest.mark.parametrize(
    ("own", "generation", "wanted"),
    [
        ({"eos_token_id": 1}, None, (1,)),
        ({"eos_token_id": 1}, {"eos_token_id": [2, 3, 2]}, (2, 3)),
        ({"eos_token_id": [4, 5]}, {"temperature": 1}, (4, 5)),
        ({}, {"eos_token_id": 0}, (0,)),
    ],
)
def test_end_of_text(tmp_path: Path, own: object, generation: object, wanted: tuple[int, ...]) -> None:
    assert eos_ids(config(tmp_path, own, generation), 6) == wanted


@pytest.mark.parametrize(
    ("own", "generation", "message"),
    [
        ({}, None, r"config\.json: eos_token_id is missing here and in generation_config\.json"),
        ({"eos_token_id": "</s>"}, None, r"config\.json: eos_token_id must be a token id or a list of token ids"),
        ({"eos_token_id": 1}, {"eos_token_id": []}, r"generation_config\.json: eos_token_id must be .*got \[\]"),
        ({"eos_token_id": -1}, None, "got -1"),
        ({"eos_token_id": 6}, None, r"config\.json: eos_token_id must be .* in \[0, 5\], got 6"),
        ({"eos_token_id": 1}, {"eos_token_id": [1, 6]}, r"generation_config\.json: eos_token_id must be .*got \[1, 6\]"),
    ],
)
def test_end_of_text_is_wrong(tmp_path: Path, own: object, generation: object, message: str) -> None:
    with pytest.raises(LoadError, match=message):
        eos_ids(config(tmp_path, own, generation), 6)


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


def test_quantisation_that_is_known(tmp_path: Path) -> None:
    assert quantization(config(tmp_path, {})) == "none"
    assert quantization(config(tmp_path, {"quantization_config": None})) == "none"
    assert quantization(config(tmp_path, {"quantization_config": FP8})) == "fp8"


def test_reading_a_config_imports_no_torch() -> None:
    code = "import sys, mtpserve.weights.rules\nfrom mtpserve.weights.checkpoint import checkpoint, hf, layouts\n"
    code += "assert not {'torch', 'transformers', 'safetensors'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
