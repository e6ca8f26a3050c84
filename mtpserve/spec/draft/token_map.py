"""Token maps: the vocabulary of a draft model's reduced head (passes.py), the most frequent tokens of texts
like those to be served.

A file is a JSON list of token ids, or an object with "tokens"; or one array of ids as .npy or .safetensors.
The idea is FR-Spec's (https://arxiv.org/abs/2502.14856); its published maps are pickles and are not read
here.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mtpserve.core.errors import ConfigError, LoadError

PICKLES = (".pt", ".pth", ".bin", ".pkl")
HOW = "make one with: mtpserve inspect --token-map OUT.json --model MODEL --token-map-size N TEXTFILE…"


def read_token_map(path: str | Path, vocab: int) -> list[int]:
    """The ids in ascending order. Raises LoadError naming the file and what is wrong in it."""
    path = Path(path)
    if path.suffix in PICKLES:
        raise LoadError(f"{path}: is a pickle, which can run code when loaded; {HOW}")
    try:
        tokens = _contents(path)
    except OSError as error:
        raise LoadError(f"{path}: cannot be read: {error.strerror or error}") from error
    except Exception as error:  # three libraries, each with its own errors
        raise LoadError(f"{path}: is not a token map: {' '.join(str(error).split())[:200]}; {HOW}") from error
    if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
        raise LoadError(f"{path}: must hold a list of token ids, or an object with such a list as 'tokens'")
    if not tokens:
        raise LoadError(f"{path}: has no tokens; at least 1 is needed")
    for token, times in Counter(tokens).items():
        if not 0 <= token < vocab:
            raise LoadError(
                f"{path}: token ids must be in [0, {vocab - 1}], the model's vocabulary, got {token}"
            )
        if times > 1:
            raise LoadError(f"{path}: token {token} is listed {times} times; each token may be listed once")
    return sorted(tokens)


def _contents(path: Path) -> Any:
    if path.suffix == ".npy":
        return np.load(path).tolist()  # refuses pickles by default
    if path.suffix == ".safetensors":
        from safetensors.numpy import load_file

        arrays = load_file(path)
        return (arrays["tokens"] if "tokens" in arrays else next(iter(arrays.values()))).tolist()
    contents = json.loads(path.read_text(encoding="utf-8"))
    return contents.get("tokens") if isinstance(contents, dict) else contents


@dataclass(frozen=True, slots=True)
class TokenMap:
    tokens: list[int]  # ascending
    counted: int  # tokens of the texts
    distinct: int
    # (size, share of the counted tokens in a map of that size), for this map's size and others
    coverage: list[tuple[int, float]]

    def write(self, path: str | Path) -> None:
        shares = {str(size): round(share, 6) for size, share in self.coverage}
        try:
            Path(path).write_text(
                json.dumps({"tokens": self.tokens, "counted": self.counted, "coverage": shares}) + "\n",
                encoding="utf-8",
            )
        except OSError as error:
            raise ConfigError(f"--token-map {path}: cannot be written: {error.strerror}") from error


def count_tokens(encode: Callable[[str], list[int]], files: Iterable[str | Path]) -> Counter[int]:
    """Raises ConfigError for a file that cannot be read as text."""
    counts: Counter[int] = Counter()
    for file in files:
        try:
            counts.update(encode(Path(file).read_text(encoding="utf-8")))
        except OSError as error:
            raise ConfigError(f"{file}: cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"{file}: is not UTF-8 text") from error
    return counts


def make_token_map(counts: Counter[int], size: int, vocab: int, always: Collection[int]) -> TokenMap:
    """The `always` tokens, then the most frequent ones, `size` in all; if fewer were seen, unseen ones in the
    order of their ids, which in learned vocabularies is roughly that of their frequency. Raises
    ConfigError."""
    if not counts:
        raise ConfigError("--token-map: the text files have no tokens to count")
    first = sorted(token for token in always if token < vocab)
    if not max(len(first), 1) <= size <= vocab:
        raise ConfigError(
            f"--token-map-size must be in [{max(len(first), 1)}, {vocab}], the special tokens and "
            f"the vocabulary, got {size}"
        )
    # The id of an added token may be beyond the model's rows.
    order = sorted(set(range(vocab)).difference(first), key=lambda token: (-counts[token], token))
    order = first + order
    total = counts.total()
    sizes = sorted({max(size // 4, 1), max(size // 2, 1), size, min(2 * size, vocab), min(4 * size, vocab)})
    coverage = [(n, sum(counts[token] for token in order[:n]) / total) for n in sizes]
    return TokenMap(sorted(order[:size]), total, len(counts), coverage)
