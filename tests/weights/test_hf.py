from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import mtpserve
from mtpserve.config import EngineConfig, ModelConfig
from mtpserve.core.errors import LoadError
from mtpserve.engine.startup.planning import describe
from mtpserve.weights.checkpoint.hf import all_eos_ids, dtype, eos_ids, quantization, read_config
from mtpserve.weights.checkpoint.hf_config import HFConfig

DEMO = Path(mtpserve.__file__).parent / "demo"


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
        ({"eos_token_id": 1}, {"eos_token_id": [2, 3, 2]}, (2, 3, 1)),
        ({"eos_token_id": [4, 5]}, {"temperature": 1}, (4, 5)),
        ({}, {"eos_token_id": 0}, (0,)),
        ({}, None, ()),
        ({"eos_token_id": 1}, {"eos_token_id": []}, (1,)),
    ],
)
def test_end_of_text(tmp_path: Path, own: object, generation: object, wanted: tuple[int, ...]) -> None:
    assert eos_ids(config(tmp_path, own, generation), 6) == wanted


@pytest.mark.parametrize(
    ("own", "generation", "message"),
    [
        ({"eos_token_id": "</s>"}, None, r"config\.json: eos_token_id must be a token id or a list of token ids"),
        ({"eos_token_id": True}, None, r"config\.json: eos_token_id must be a token id or a list of token ids, got true"),
        ({"eos_token_id": 1}, {"eos_token_id": [1, "6"]}, r"generation_config\.json: eos_token_id must be .*got \[1, "),
    ],
)
def test_end_of_text_is_wrong(tmp_path: Path, own: object, generation: object, message: str) -> None:
    with pytest.raises(LoadError, match=message):
        eos_ids(config(tmp_path, own, generation), 6)


@pytest.mark.parametrize("wrong", [[1, 6], [-1, 1]])
def test_ends_of_text_that_no_model_writes_are_left_out(tmp_path: Path, wrong: list[int], caplog: pytest.LogCaptureFixture) -> None:
    """A warning names them, one however often a plan is made."""
    for _ in range(2):
        assert eos_ids(config(tmp_path, {"eos_token_id": wrong}), 6) == (1,)
    [line] = [record.getMessage() for record in caplog.records]
    assert line == f"{tmp_path / 'config.json'}: eos_token_id {sum(wrong) - 1} is ignored: the model's token ids are in [0, 5]"


ADDED = {"id": 4, "content": "<end>", "special": True}
TOKENIZERS: dict[str, dict[str, object]] = {
    "in its config": {"tokenizer_config.json": {"eos_token": "<end>", "added_tokens_decoder": {"4": ADDED}}},
    "with properties": {"tokenizer_config.json": {"eos_token": ADDED, "added_tokens_decoder": {"3": {"content": "x"}, "4": ADDED}}},
    "added": {"tokenizer_config.json": {"eos_token": "<end>"}, "tokenizer.json": {"added_tokens": [{"id": 1, "content": "x"}, ADDED]}},
    "in the vocabulary": {"tokenizer_config.json": {"eos_token": "<end>"}, "tokenizer.json": {"model": {"vocab": {"x": 1, "<end>": 4}}}},
    "in a list": {"tokenizer_config.json": {"eos_token": "c"}, "tokenizer.json": {"model": {"vocab": [[t, 0.0] for t in "xyabcz"]}}},
    "in the older file": {"special_tokens_map.json": {"eos_token": "<end>"}, "tokenizer.json": {"added_tokens": [ADDED]}},
}


@pytest.mark.parametrize("files", TOKENIZERS.values(), ids=TOKENIZERS.keys())
def test_the_tokenizers_end_of_text_is_one_too(tmp_path: Path, files: dict[str, object]) -> None:
    (tmp_path / "text").mkdir()
    for name, values in files.items():
        (tmp_path / "text" / name).write_text(json.dumps(values))
    found = config(tmp_path, {})
    assert all_eos_ids(found, (), 6, tmp_path / "text") == (4,)
    assert all_eos_ids(found, (1, 4, 2), 6, tmp_path / "text") == (1, 4, 2) and all_eos_ids(found, (1,), 4, tmp_path / "text") == (1,)


def test_an_engine_ends_texts_at_all_of_them(tmp_path: Path) -> None:
    """The demo's tokenizer names 1; it may be in another directory than the weights."""
    tokenizer = shutil.copytree(DEMO, tmp_path / "text")
    weights = shutil.copytree(DEMO, tmp_path / "weights", ignore=shutil.ignore_patterns("token*"))
    for directory in (tokenizer, weights):
        (directory / "generation_config.json").write_text('{"eos_token_id": [5]}')
        (directory / "config.json").write_text((DEMO / "config.json").read_text().replace('"eos_token_id": 1', '"eos_token_id": 7'))
    for model in (ModelConfig(model=str(tokenizer)), ModelConfig(model=str(weights), tokenizer=str(tokenizer))):
        assert describe(EngineConfig(model=model), want_mtp=True).arch.eos_ids == (5, 7, 1)


@pytest.mark.parametrize("values", [{}, {"eos_token": None}, {"eos_token": "<end>"}, {"eos_token": 4}])
def test_no_end_of_text_at_all(tmp_path: Path, values: dict[str, object]) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(values))
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"x": 1}}}))
    with pytest.raises(LoadError, match=r"config\.json: neither eos_token_id here or in .* nor the eos_token of .* is an id in \[0, 5\]"):
        all_eos_ids(config(tmp_path, {}), (), 6, tmp_path)


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


def test_quantisation_that_is_known(tmp_path: Path) -> None:
    assert quantization(config(tmp_path, {})) == "none"
    assert quantization(config(tmp_path, {"quantization_config": None})) == "none"
    assert quantization(config(tmp_path, {"quantization_config": FP8})) == "fp8"


def test_reading_a_config_imports_no_torch() -> None:
    code = "import sys, mtpserve.weights.rules\nfrom mtpserve.weights.checkpoint import checkpoint, hf, layouts\n"
    code += "assert not {'torch', 'transformers', 'safetensors'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
