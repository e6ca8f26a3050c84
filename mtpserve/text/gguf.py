"""The tokenizer in a GGUF file's metadata, as one of the tokenizers library; its chat template and the
parameters that it recommends.

Not by transformers: its conversion imports torch, and splits text of unknown kinds as GPT-2 does. Here they
are refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer as FastTokenizer,
    decoders,
    normalizers,
    pre_tokenizers,
    processors,
)
from tokenizers.models import BPE

from mtpserve.core.errors import LoadError, MTPServeError, UnsupportedModel
from mtpserve.core.gguf import GGUFHeader

KEY = "tokenizer.ggml."
# tokens' types in the file: both are found in text before anything is split, the first are special
CONTROL, USER_DEFINED = 3, 4
# transformers' names → the file's
NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
# a request's → general.sampling's
SAMPLING = {"temperature": "temp", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p"}

CONTRACTIONS, ENDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)", r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{ENDS}"
QWEN2 = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{ENDS}"
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# How text is split before merges, by the file's name for it: at an expression's matches, or as GPT-2 does,
# also with each digit by itself.
SPLITS = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "glm4", "chatglm-bpe"), LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), QWEN2),
    "tekken": TEKKEN,
}
GPT2, DIGITS = ("gpt-2",), ("smollm", "starcoder", "refact", "command-r", "codeshell")
# a word that is a token is taken without looking at merges
WHOLE = ("llama-bpe", "llama3", "llama-v3", "tekken")
COMPOSED = ("qwen2",)  # text is put into Unicode's composed form


def fast_tokenizer(path: Path) -> FastTokenizer:
    """Raises LoadError and UnsupportedModel."""
    try:
        return _tokenizer(path)
    except MTPServeError:
        raise
    except Exception as error:  # the library raises bare Exception for a vocabulary that it cannot take
        raise LoadError(
            f"{path}: its tokenizer cannot be made: {' '.join(str(error).split())[:300]}"
        ) from error


def _tokenizer(path: Path) -> FastTokenizer:
    header = GGUFHeader.read(path)
    kind = header.get(KEY + "model", str)
    if kind not in ("gpt2", "llama"):
        raise UnsupportedModel(
            f'{path}: {KEY}model = "{kind}" is not supported; supported: gpt2 and llama, byte-level '
            f"and SentencePiece BPE"
        )
    tokens: list[str] = header.array(KEY + "tokens")
    if not tokens:
        raise LoadError(f"{path}: {KEY}tokens is missing; it must be an array of strings")
    tokenizer = byte_level(header, tokens) if kind == "gpt2" else sentence_piece(header, tokens)
    kinds = list(zip(tokens, header.array(KEY + "token_type"), strict=False))
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False) for token, of in kinds if of == CONTROL]
    )
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token, of in kinds if of == USER_DEFINED])
    # as in llama.cpp where the file does not say
    begins = kind == "llama" or header.get(KEY + "pre", str, "") in WHOLE
    before, after = around(header, tokens, "bos", begins), around(header, tokens, "eos", False)
    special = {token: tokens.index(token) for token in before + after}
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *after], special_tokens=list(special.items())
    )
    return tokenizer


def around(header: GGUFHeader, tokens: list[str], name: str, otherwise: bool) -> list[str]:
    """The token of this name if it is put before or after a prompt."""
    token = (
        named_token(header, tokens, name) if header.get(f"{KEY}add_{name}_token", bool, otherwise) else None
    )
    return [] if token is None else [token]


def byte_level(header: GGUFHeader, tokens: list[str]) -> FastTokenizer:
    split = header.get(KEY + "pre", str)
    if split not in (*SPLITS, *GPT2, *DIGITS):
        names = ", ".join((*SPLITS, *GPT2, *DIGITS))
        raise UnsupportedModel(f'{header.path}: {KEY}pre = "{split}" is not supported; supported: {names}')
    merges = [pair(merge) for merge in header.array(KEY + "merges")]
    tokenizer = FastTokenizer(BPE(ids(tokens), merges, ignore_merges=split in WHOLE))
    if split in COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    by_gpt2 = split in (*GPT2, *DIGITS)
    before: list[Any] = [] if by_gpt2 else [pre_tokenizers.Split(Regex(SPLITS[split]), behavior="isolated")]
    if split in DIGITS:
        before = [pre_tokenizers.Digits(individual_digits=True)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*before, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=by_gpt2)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def sentence_piece(header: GGUFHeader, tokens: list[str]) -> FastTokenizer:
    """SentencePiece's BPE: bytes for what is not in the vocabulary, ▁ for a space, and one before the
    text."""
    vocab, unknown = ids(tokens), named_token(header, tokens, "unknown")
    merges = [pair(merge) for merge in header.array(KEY + "merges")] or scored_merges(
        vocab, header.array(KEY + "scores")
    )
    tokenizer = FastTokenizer(BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    begins = header.get(KEY + "add_space_prefix", bool, True)
    tokenizer.normalizer = normalizers.Sequence(
        [*([normalizers.Prepend("▁")] if begins else []), normalizers.Replace(" ", "▁")]
    )
    strip = [decoders.Strip(" ", 1, 0)] if begins else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def scored_merges(vocab: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """All pairs of tokens that make a token, those of the best first: SentencePiece merges the pair whose
    token has the best score."""
    candidates = []
    for token, id in vocab.items():
        halves = [(token[:i], token[i:]) for i in range(1, len(token))]
        pairs = [
            (vocab[left], vocab[right], left, right)
            for left, right in halves
            if left in vocab and right in vocab
        ]
        candidates += [
            (scores[id], len(left), len(right), left, right) for _, _, left, right in sorted(pairs)
        ]
    return [
        (left, right) for *_, left, right in sorted(candidates, key=lambda merge: merge[:3], reverse=True)
    ]


def ids(tokens: list[str]) -> dict[str, int]:
    return {token: id for id, token in enumerate(tokens)}


def pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def named_token(header: GGUFHeader, tokens: list[str], name: str) -> str | None:
    id = header.get(f"{KEY}{name}_token_id", int, -1)
    return tokens[id] if 0 <= id < len(tokens) else None


def named_tokens(path: Path) -> dict[str, str]:
    """The special tokens by transformers' names."""
    header = GGUFHeader.read(path)
    tokens = header.array(KEY + "tokens")
    by_name = {name: named_token(header, tokens, of) for name, of in NAMED.items()}
    return {name: token for name, token in by_name.items() if token is not None}


def chat_template(path: Path) -> str | dict[str, str] | None:
    """Several by name where the file has several."""
    header, key = GGUFHeader.read(path), "tokenizer.chat_template"
    templates = {
        str(name): header.get(f"{key}.{name}", str) for name in header.array("tokenizer.chat_templates")
    }
    if not header.has(key):
        return templates or None
    template = header.get(key, str)
    return {"default": template, **templates} if templates else template


def recommended(path: Path) -> dict[str, float | int]:
    header = GGUFHeader.read(path)
    values = {name: header.metadata.get(f"general.sampling.{key}") for name, key in SAMPLING.items()}
    return {name: value for name, value in values.items() if isinstance(value, int | float)}
