"""GGUF files that are damaged, foreign or incomplete: each is refused in one line that names the file and what is wrong with it."""

from __future__ import annotations

import random
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from mtpserve.config import EngineConfig, ModelConfig
from mtpserve.core.errors import LoadError, UnsupportedModel
from mtpserve.core.gguf import GGUFHeader
from mtpserve.engine.startup.fingerprint import fingerprint
from mtpserve.engine.startup.planning import Described, describe, empty_model, plan, sources
from mtpserve.engine.startup.storage import Storage
from mtpserve.tools.inspect.checkpoint import inspect_model
from mtpserve.weights.checkpoint.checkpoint import Checkpoint
from mtpserve.weights.checkpoint.hf import read_config
from mtpserve.weights.plan import plan as placements
from mtpserve.weights.quantise import quantise
from tests.models.checkpoints import Tiny, llama, qwen3_moe
from tests.weights.gguf_files import as_gguf


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return llama(tmp_path_factory.mktemp("gguf"), hidden_size=64, intermediate_size=64, head_dim=16)


@pytest.fixture(scope="module")
def file(tiny: Tiny) -> Path:
    return as_gguf(tiny, tiny.directory / "model.gguf", Kind.Q8_0, general__languages=["en", "de"]).directory


def described(path: Path, **options: Any) -> Described:
    return describe(EngineConfig(model=ModelConfig(model=str(path), **options)), want_mtp=False)


def placed(path: Path) -> None:
    found = described(path)
    placements(empty_model(found, torch.float32, 8, Storage(False, torch.float32)), sources(found))


def test_a_header(file: Path) -> None:
    header = GGUFHeader.read(file)
    theirs = gguf.GGUFReader(file)
    assert [(t.name, list(t.shape), t.kind, t.start) for t in header.tensors] == [
        (t.name, t.shape.tolist()[::-1], t.tensor_type.value, t.data_offset) for t in theirs.tensors
    ]
    assert set(header.metadata) == {key for key in theirs.fields if not key.startswith("GGUF.")}
    assert header.get("llama.block_count", int) == 3 and header.array("general.languages") == ["en", "de"]
    assert header.get("llama.none", int, 7) == 7 and header.array("llama.none") == []
    with pytest.raises(LoadError, match=r"model.gguf: general.languages must be an integer, got an array"):
        header.get("general.languages", int)
    with pytest.raises(LoadError, match=r"model.gguf: llama.block_count must be an array, got 3"):
        header.array("llama.block_count")


def test_what_inspect_shows(file: Path) -> None:
    report = inspect_model(EngineConfig(model=ModelConfig(model=str(file), device="cpu")))
    by_group = {(group, dtype): (tensors, size) for group, tensors, _, dtype, size in report.weights}
    assert by_group["attention", "Q8_0"] == (12, 3 * (2 * 64 + 2 * 32) * 64 // 32 * 34) and by_group["norms", "F32"] == (7, 7 * 64 * 4)
    assert report.arch.dtype == "bfloat16" and report.arch.norm_eps == 1e-5


@pytest.mark.parametrize(("kind", "dtype"), [(Kind.F32, "float32"), (Kind.F16, "float16"), (Kind.BF16, "bfloat16")])
def test_the_number_format(tiny: Tiny, tmp_path: Path, kind: Kind, dtype: str) -> None:
    path = as_gguf(tiny, tmp_path / "model.gguf", kind).directory
    assert described(path).arch.dtype == dtype
    assert str(Checkpoint.open(path).tensor("model.layers.0.mlp.up_proj.weight").dtype) == f"torch.{dtype}"


def test_dummy_weights_from_the_metadata_alone(tiny: Tiny, file: Path, tmp_path: Path) -> None:
    """The tensors' names and shapes are needed, not their numbers."""
    header = GGUFHeader.read(file)
    (tmp_path / "cut.gguf").write_bytes(file.read_bytes()[: min(tensor.start for tensor in header.tensors)])
    found = described(tmp_path / "cut.gguf", load_format="dummy")
    assert found.dummy and found.arch == described(file).arch
    assert not ModelConfig(model=str(file), load_format="dummy").numbers_for_text, "the file has a tokenizer"
    with pytest.raises(LoadError, match=r"cut.gguf: is truncated: \S+ ends at byte \d+, the file has only \d+"):
        described(tmp_path / "cut.gguf")


def test_the_fingerprint_reads_the_tensors(tiny: Tiny, file: Path, tmp_path: Path) -> None:
    other = tmp_path / "model.gguf"
    other.write_bytes(file.read_bytes())
    configs = [EngineConfig(model=ModelConfig(model=str(path), device="cpu")) for path in (file, other)]
    same = [fingerprint(config, plan(config)) for config in configs]
    tensor = GGUFHeader.read(other).tensors[-1]
    with other.open("r+b") as opened:
        opened.seek(tensor.start)
        opened.write(bytes(other.stat().st_size - tensor.start))
    assert same[0] == same[1] != fingerprint(configs[1], plan(configs[1]))


def test_experts_are_named_one_by_one(tmp_path: Path) -> None:
    made = as_gguf(qwen3_moe(tmp_path, hidden_size=64, head_dim=16, moe_intermediate_size=32), tmp_path / "model.gguf", Kind.Q4_0)
    checkpoint, raw = Checkpoint.open(made.directory), gguf.GGUFReader(made.directory)
    whole = next(tensor for tensor in raw.tensors if tensor.name == "blk.1.ffn_down_exps.weight")
    numbers = torch.from_numpy(gguf.quants.dequantize(np.array(whole.data), Kind.Q4_0))
    for expert in (0, 7):
        name = f"model.layers.1.mlp.experts.{expert}.down_proj.weight"
        assert checkpoint.tensors[name].dtype == "Q4_0" and torch.equal(checkpoint.tensor(name), numbers[expert])


def test_float8_is_made_of_safetensors(file: Path, tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"model.gguf: is a GGUF file; float8 is made of a directory with safetensors files"):
        quantise(file, tmp_path / "out")


def test_every_beginning_of_a_file_is_refused(file: Path, tmp_path: Path) -> None:
    data, cut = file.read_bytes(), tmp_path / "cut.gguf"
    header = min(tensor.start for tensor in GGUFHeader.read(file).tensors)
    for length in (*range(64), *range(64, header, 97), header, len(data) - 1):
        cut.write_bytes(data[:length])
        with pytest.raises(LoadError, match=r"cut.gguf: is (truncated|not a GGUF file)"):
            Checkpoint.open(cut)


def test_half_a_file_is_refused_before_torch_is_imported(file: Path, tmp_path: Path) -> None:
    (tmp_path / "half.gguf").write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    code = f"""
import sys
from mtpserve.config import EngineConfig, ModelConfig
from mtpserve.engine.startup.start import build_engine
try:
    build_engine(EngineConfig(model=ModelConfig(model={str(tmp_path / "half.gguf")!r})))
except Exception as error:
    print(error, [name for name in ("torch", "transformers") if name in sys.modules])
"""
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout
    assert "half.gguf: is truncated: " in told and told.endswith(" []\n")


def test_damage_in_the_header_is_never_another_error(file: Path, tmp_path: Path) -> None:
    data, damaged, random_bytes = file.read_bytes(), tmp_path / "damaged.gguf", random.Random(0)
    header, said = min(tensor.start for tensor in GGUFHeader.read(file).tensors), []
    for _ in range(300):
        changed = bytearray(data)
        for _ in range(random_bytes.choice((1, 4))):
            changed[random_bytes.randrange(8, header)] = random_bytes.choice((0, 1, 8, 9, 127, 255, random_bytes.randrange(256)))
        damaged.write_bytes(changed)
        try:
            described(damaged)
        except LoadError as error:
            said.append(str(error))
    assert len(said) > 100 and all("damaged.gguf" in line and "\n" not in line for line in said)


@pytest.mark.parametrize(
    ("start", "message"),
    [
        (b"version https://git-lfs", "is not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "has version 1; GGUF of versions (2, 3) can be read"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "has version 50331648; GGUF of versions (2, 3) can be read, with the lowest byte first"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 0), "general.architecture is missing; it must be a string"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), "is truncated"),
    ],
)
def test_other_files(tmp_path: Path, start: bytes, message: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(start)
    with pytest.raises(LoadError) as caught:
        read_config(path)
    assert f"{path}: {message}" in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    for read in (read_config, Checkpoint.open):
        with pytest.raises(LoadError, match=r"none.gguf: cannot be read: No such file"):
            read(tmp_path / "none.gguf")  # type: ignore[operator]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"general__architecture": "gemma3"}, 'general.architecture = "gemma3" is not supported; supported: llama, qwen2, qwen2moe'),
        ({"llama__block_count": None}, "llama.block_count is missing; it must be an integer"),
        ({"llama__embedding_length": "wide"}, "llama.embedding_length must be an integer, got 'wide'"),
        ({"llama__attention__head_count": [4, 4, 2]}, "llama.attention.head_count must be an integer, got an array"),
        ({"llama__attention__layer_norm_rms_epsilon": None}, "llama.attention.layer_norm_rms_epsilon is missing"),
        ({"tokenizer__ggml__eos_token_id": None}, "tokenizer.ggml.eos_token_id is missing; it must be an integer"),
        ({"tokenizer__ggml__eos_token_id": 24}, "neither eos_token_id here"),
        ({"split__count": 3}, "is one of 3 parts; `llama-gguf-split --merge` makes one file of them"),
        ({"llama__expert_count": 8}, "llama.expert_count = 8 is not supported"),
        ({"llama__attention__sliding_window": 4096}, "llama.attention.sliding_window = 4096 is not supported"),
        ({"llama__logit_scale": 0.5}, "llama.logit_scale = 0.5 is not supported"),
        ({"llama__attention__value_length": 8}, "llama.attention.value_length = 8 is not supported; supported: key_length = 16"),
        ({"llama__rope__dimension_count": 8}, "llama.rope.dimension_count = 8 is not supported; supported: 16, a whole head"),
        (
            {"llama__rope__scaling__type": "longrope", "llama__rope__scaling__factor": 4.0},
            'rope.scaling.type = "longrope" is not supported',
        ),
        ({"llama__rope__scaling__type": "yarn", "llama__rope__scaling__factor": 4.0}, "rope.scaling.original_context_length is missing"),
        (
            {"llama__attention__key_length": 32, "llama__attention__value_length": 32, "llama__rope__dimension_count": 32},
            "has shape [64, 64]",
        ),
        ({"llama__attention__key_length": 0, "llama__attention__value_length": 0}, "llama.attention.key_length must be at least 2, got 0"),
        ({"llama__rope__freq_base": -1.0}, "llama.rope.freq_base must be a number above 0, got -1.0"),
        ({"llama__block_count": 2}, "model.layers.2."),
        ({"llama__block_count": 4}, "missing model.layers.3."),
    ],
)
def test_metadata_that_is_refused(tiny: Tiny, tmp_path: Path, entries: dict[str, Any], message: str) -> None:
    architecture = entries.pop("general__architecture", None)
    path = as_gguf(tiny, tmp_path / "model.gguf", **entries).directory
    if architecture is not None:
        path.write_bytes(path.read_bytes().replace(*(struct.pack("<Q", len(a)) + a for a in (b"llama", architecture.encode())), 1))
    with pytest.raises(LoadError) as caught:
        placed(path)
    assert str(tmp_path / "model.gguf") in str(caught.value) and message in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (99, "blk.0.ffn_up.weight has type 99, which the installed gguf does not know"),
        (Kind.Q8_1.value, "blk.0.ffn_up.weight is stored as Q8_1, which is not supported; supported: F32, F16, Q4_0"),
        (Kind.I32.value, "blk.0.ffn_up.weight is stored as I32, which is not supported"),
        (Kind.Q4_K.value, "blk.0.ffn_up.weight of shape [64, 64] cannot be Q4_K, in blocks of 256"),
    ],
)
def test_types_that_are_refused(file: Path, tmp_path: Path, kind: int, message: str) -> None:
    data, name = bytearray(file.read_bytes()), b"blk.0.ffn_up.weight"
    at = data.index(name) + len(name) + 4 + 2 * 8
    data[at : at + 4] = struct.pack("<I", kind)
    (tmp_path / "model.gguf").write_bytes(data)
    with pytest.raises(LoadError) as caught:
        described(tmp_path / "model.gguf")
    assert f"model.gguf: {message}" in str(caught.value)


def test_other_factors_of_the_rotation_are_refused(tiny: Tiny, tmp_path: Path) -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 2.0}
    made = llama(tmp_path, rope_scaling=scaling | {"original_max_position_embeddings": 1024})
    path = as_gguf(made, tmp_path / "model.gguf").directory
    with pytest.raises(UnsupportedModel, match=r"rope_freqs.weight is not supported; supported: the factors of Llama 3's scaling with low"):
        read_config(path)
