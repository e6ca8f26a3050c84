"""The demo model's text: the Python standard library's own source, and the tokenizer trained on it.

Nothing is downloaded: the corpus is part of every Python installation. One file in twenty is held out by a hash of its
name; held-out files are used for measuring only (`held_out()`), never for the tokenizer or the weights.
"""

from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

BOS, EOS = "<|begin_of_text|>", "<|end_of_text|>"
VOCABULARY = 2048
# Without tests, which are repetitive, and tables, which are data: neither teaches a language model Python.
LEFT_OUT = ("site-packages", "test", "tests", "encodings", "pydoc_data", "lib2to3", "idle_test", "__pycache__")
# Newlines are pieces of their own and never join the following word: a prompt that ends in a newline must look like
# a place inside a file, not like the end of one. Indentation is one piece; a word takes one leading space with it.
PIECES = r" ?[\p{L}_]+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}_]+|\n+|[^\S\n]+(?=\S)|[^\S\n]+"


def files() -> list[Path]:
    """Every file of the corpus, sorted by its name inside the library."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [p for p in root.rglob("*.py") if not set(p.relative_to(root).parts[:-1]) & set(LEFT_OUT)]
    return sorted((p for p in files if p.stat().st_size > 400), key=lambda p: str(p.relative_to(root)))


def is_held_out(path: Path) -> bool:
    root = Path(sysconfig.get_paths()["stdlib"])
    return hashlib.sha256(str(path.relative_to(root)).encode()).digest()[0] < 13  # 13/256: about one in twenty


def read(path: Path) -> str:
    return path.read_text("utf8", errors="ignore")


def held_out() -> list[Path]:
    return [p for p in files() if is_held_out(p)]


def train_tokenizer() -> Tokenizer:
    """Byte-level BPE, trained on the files that are not held out. Decodes to exactly the bytes that were encoded."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((read(p) for p in files() if not is_held_out(p)), trainer)
    bos = tokenizer.token_to_id(BOS)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, bos)])
    return tokenizer


def tokens(tokenizer: Tokenizer, paths: list[Path]) -> torch.Tensor:
    """All files one after another, each as BOS text EOS.  # [tokens] int64"""
    eos = tokenizer.token_to_id(EOS)
    return torch.tensor([t for e in tokenizer.encode_batch([read(p) for p in paths]) for t in (*e.ids, eos)])
