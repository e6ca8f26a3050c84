"""config.json and generation_config.json as Hugging Face writes them, read with plain json: transformers
takes seconds to import. A GGUF file's metadata is read as the config.json that the file was made from.

Not a schema: a family reads the keys that it uses, and every error names the file, the key, its value and
what is accepted.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

from mtpserve.core.arch.rope import LinearRopeArch, Llama3RopeArch, RopeArch, YarnArch
from mtpserve.core.errors import LoadError
from mtpserve.core.gguf import SUFFIX
from mtpserve.weights.checkpoint import schemes
from mtpserve.weights.checkpoint.hf_config import HFConfig

log = logging.getLogger(__name__)
MSCALES = ("mscale", "mscale_all_dim")
DTYPES = ("bfloat16", "float16", "float32")


def read_config(directory: str | Path) -> HFConfig:
    directory = Path(directory)
    if directory.suffix == SUFFIX:
        from mtpserve.weights.checkpoint.gguf_config import gguf_config

        return gguf_config(directory)
    if not directory.is_dir():
        raise LoadError(
            f"{directory}: no such directory; a checkpoint is a directory with config.json and *.safetensors"
        )
    path = directory / "config.json"
    if not path.is_file():
        raise LoadError(f"{directory}: no config.json in this directory")
    config = _read_object(path)
    # What sees pictures has the text model's keys in a section of their own.
    text_config = HFConfig(path, config.values | config.section("text_config").values)
    # Where layers are listed block by block, newer versions of transformers do not count them. LongCat-Flash
    # counts under another name.
    blocks = text_config.raw("layers_block_type")
    number = len(blocks) if isinstance(blocks, list) else text_config.raw("num_layers")
    return text_config.with_default("num_hidden_layers", number)


def _read_object(path: Path) -> HFConfig:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise LoadError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise LoadError(f"{path}: is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise LoadError(f"{path}: must hold a JSON object, got {type(values).__name__}")
    return HFConfig(path, values)


def dtype(config: HFConfig) -> str:
    """The checkpoint's: `dtype`, in older files `torch_dtype`; float32 if neither is set, as in
    transformers."""
    name = "dtype" if config.has("dtype") else "torch_dtype"
    value = config.get_str(name, "float32").removeprefix("torch.")
    config.require(value in DTYPES, name, f"one of {', '.join(DTYPES)}")
    return value


def eos_ids(config: HFConfig, vocab: int) -> tuple[int, ...]:
    """The ids that end a text by generation_config.json and config.json together, below `vocab`. Raises
    LoadError for what are no ids."""
    generation = config.path.parent / "generation_config.json"
    has_other = config.path.suffix != SUFFIX and generation.is_file()
    sources = [*([_read_object(generation)] if has_other else []), config]
    return tuple(dict.fromkeys(token for source in sources for token in _ids(source, vocab)))


def all_eos_ids(
    config: HFConfig, config_ids: tuple[int, ...], vocab: int, tokenizer: Path
) -> tuple[int, ...]:
    """Adds the tokenizer's end of text to `config_ids`: a chat's template may end turns with it alone.
    Raises LoadError if there is none at all."""
    token = tokenizer_eos(tokenizer)
    ids = tuple(
        dict.fromkeys((*config_ids, *writable((token,) if token is not None else (), vocab, tokenizer)))
    )
    if ids:
        return ids
    raise LoadError(
        f"{config.path}: neither eos_token_id here or in generation_config.json nor the eos_token of "
        f"{tokenizer} is an id in [0, {vocab - 1}]"
    )


def _ids(config: HFConfig, vocab: int) -> Sequence[int]:
    value = config.raw("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    config.require(all(type(i) is int for i in ids), "eos_token_id", "a token id or a list of token ids")
    return writable(tuple(ids), vocab, config.path)


@lru_cache(maxsize=256)  # so that a warning is one, however often a plan is made
def writable(ids: tuple[int, ...], vocab: int, path: Path) -> Sequence[int]:
    """The ids that the model can write; it warns of others."""
    wrong = [i for i in ids if not 0 <= i < vocab]
    if wrong:
        log.warning(
            "%s: eos_token_id %s is ignored: the model's token ids are in [0, %d]",
            path,
            ", ".join(map(str, wrong)),
            vocab - 1,
        )
    return [i for i in ids if i not in wrong]


def tokenizer_eos(directory: Path) -> int | None:
    """The id of the tokenizer's `eos_token`, from its files; None if it has none."""
    files = (directory / name for name in ("tokenizer_config.json", "special_tokens_map.json"))
    configs = [_read_object(file) for file in files if file.is_file()]
    texts = (_text(config.raw("eos_token")) for config in configs)
    token = next((text for text in texts if text is not None), None)
    if token is None:
        return None
    for config in configs:
        for number, added in config.section("added_tokens_decoder").values.items():
            if _text(added) == token and number.isdecimal():
                return int(number)
    whole = directory / "tokenizer.json"
    return _id_of(whole, whole.stat().st_mtime_ns, token) if whole.is_file() else None


@lru_cache(maxsize=16)  # the file may have megabytes
def _id_of(path: Path, changed: int, token: str) -> int | None:
    tokenizer = _read_object(path)
    for added in tokenizer.raw("added_tokens") or []:
        if _text(added) == token:
            return added.get("id") if type(added.get("id")) is int else None
    vocab = tokenizer.section("model").raw("vocab")
    if isinstance(vocab, dict):
        return vocab.get(token) if type(vocab.get(token)) is int else None
    pairs = vocab if isinstance(vocab, list) else []
    return next((i for i, pair in enumerate(pairs) if isinstance(pair, list) and pair[:1] == [token]), None)


def _text(token: object) -> str | None:
    """A token's text: tokenizers write it alone, or with its properties."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def quantization(config: HFConfig) -> str:
    """The method by which the config says that weights are quantised, or none; checked, see schemes.py. Which
    matrices are is said by their tensors, not by this."""
    section = quantization_section(config)
    if not section.values:
        return "none"
    schemes.check(section)
    return section.get_str("quant_method")


def quantization_section(config: HFConfig) -> HFConfig:
    """Returns the section of config.json, or of the file beside it in which ModelOpt writes it."""
    beside = config.path.parent / "hf_quant_config.json"
    if config.has("quantization_config") or not beside.is_file():
        return config.section("quantization_config")
    section = _read_object(beside).section("quantization")
    return HFConfig(section.path, {"quant_method": "modelopt"} | section.values, section.prefix)


def of_layers(config: HFConfig, kind: str) -> HFConfig:
    """Returns the config with the rotation of layers of one kind, where `rope_parameters` has one for each
    kind."""
    section = config.section("rope_parameters")
    if not section.has(kind):
        return config
    values = config.values | {"rope_parameters": section.section(kind).values}
    return HFConfig(config.path, values, config.prefix)


def rope(
    config: HFConfig, dim: int, interleaved: bool, part: float = 1.0, *, mscale_alone: bool = False
) -> RopeArch:
    """Reads `rope_parameters`, or `rope_theta` and `rope_scaling` in older files: none, default, linear,
    llama3 or yarn.

    `dim`, of a head, and `interleaved` come from the family: most configs have no key for them. `part` of a
    head's numbers are rotated where `partial_rotary_factor` says nothing else. `mscale_alone`: YaRN's
    `mscale` counts without `mscale_all_dim`, as in DeepSeek's code, and not in that of other families.
    """
    name = "rope_parameters" if config.has("rope_parameters") else "rope_scaling"
    section = config.section(name)
    if section.get_bool("mrope_interleaved", False):
        # For text alone the three parts of a position are equal.
        section = HFConfig(
            section.path,
            {k: v for k, v in section.values.items() if not k.startswith("mrope")},
            section.prefix,
        )
    nested = [value for value in section.values.values() if isinstance(value, dict)]
    if nested and all(value == nested[0] for value in section.values.values()):
        section = HFConfig(section.path, nested[0], section.prefix)  # the same for each kind of layers
    elif nested:
        raise config.unsupported(name, "one set of numbers for all layers")
    theta = section.get_float("rope_theta", None, above=0)
    if theta is None:
        theta = config.get_float("rope_theta", 10000.0, above=0)
    kind_key = "rope_type" if section.has("rope_type") else "type"
    kind = section.get_str(kind_key, "default")
    if kind not in SCALINGS:
        raise section.unsupported(kind_key, ", ".join(SCALINGS))
    if not mscale_alone and (section.has("attention_factor") or not all(map(section.raw, MSCALES))):
        values = {key: value for key, value in section.values.items() if key not in MSCALES}
        section = HFConfig(section.path, values, section.prefix)
    where = section if section.has("partial_rotary_factor") else config
    rotated = int(dim * where.get_float("partial_rotary_factor", part, above=0))
    where.require(
        2 <= rotated <= dim and rotated % 2 == 0,
        "partial_rotary_factor",
        f"such that an even part of a head's {dim} is rotated",
    )
    return RopeArch(rotated, theta, interleaved, SCALINGS[kind](config, section))


def _llama3(config: HFConfig, section: HFConfig) -> Llama3RopeArch:
    low, high = section.get_float("low_freq_factor", above=0), section.get_float("high_freq_factor", above=0)
    section.require(low < high, "high_freq_factor", f"more than low_freq_factor = {low:g}")
    return Llama3RopeArch(section.get_float("factor", above=0), low, high, _original_length(config, section))


def _original_length(config: HFConfig, section: HFConfig) -> int:
    """The positions before the scaling. As in transformers the config's own key comes before the section's,
    and all positions stand for both."""
    name = "original_max_position_embeddings"
    source = next((source for source in (config, section) if source.has(name)), None)
    return (
        config.get_int("max_position_embeddings", at_least=1)
        if source is None
        else source.get_int(name, at_least=1)
    )


def _linear(config: HFConfig, section: HFConfig) -> LinearRopeArch:
    return LinearRopeArch(section.get_float("factor", above=0))


def _yarn(config: HFConfig, section: HFConfig) -> YarnArch:
    length = _original_length(config, section)
    if "factor" in section.values and not section.has("factor"):  # null, as in transformers
        section = section.with_default(
            "factor", config.get_int("max_position_embeddings", at_least=1) / length
        )
    factor = section.get_float("factor", above=0)
    mscale, all_dim = section.get_float("mscale", 1.0), section.get_float("mscale_all_dim", 0.0)
    gain = section.get_float("attention_factor", None, above=0)
    if gain is not None:
        # The gain itself instead of the mscale from which it is computed: gain = 0.1 mscale ln(factor) + 1.
        if all_dim or factor <= 1:
            raise section.unsupported(
                "attention_factor", "none together with mscale_all_dim, or with a factor of 1 or less"
            )
        mscale = (gain - 1) / (0.1 * math.log(factor))
    return YarnArch(
        factor=factor,
        original_length=length,
        beta_fast=section.get_float("beta_fast", 32.0, above=0),
        beta_slow=section.get_float("beta_slow", 1.0, above=0),
        mscale=mscale,
        mscale_all_dim=all_dim,
        truncate=section.get_bool("truncate", True),
    )


def _plain(config: HFConfig, section: HFConfig) -> None:
    return None


SCALINGS: dict[str, Callable[[HFConfig, HFConfig], LinearRopeArch | Llama3RopeArch | YarnArch | None]] = {
    "default": _plain,
    "none": _plain,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
