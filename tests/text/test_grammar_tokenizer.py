"""Forced text is written in tokens that give it back: whatever the tokenizer makes of the text, the mask allows what is taken."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as FastTokenizer, normalizers, pre_tokenizers

from mtpserve.config import ModelConfig
from mtpserve.core.sampling import GrammarSpec
from mtpserve.text import gguf
from mtpserve.text.grammars.grammar import LLGuidanceCompiler
from mtpserve.text.grammars.grammar_tokenizer import after_first_letter
from tests.text import test_gguf_tokenizer, tiny

DEMO = ModelConfig().directory
FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
MARKERS = ["<tool_call>", "<|im_end|>", "<|im_start|>", "</think>", "<|im_end|>|>", "§"]


def demo(path: Path) -> FastTokenizer:
    return FastTokenizer.from_file(str(DEMO / "tokenizer.json"))


def marked(path: Path, normalizer: Any = None, pre_tokenizer: Any = None, **flags: bool) -> FastTokenizer:
    """Tokens of its own for markers, every other one special."""
    content = json.loads((tiny.write(path) / "tokenizer.json").read_text())
    for index, marker in enumerate(MARKERS):
        content["added_tokens"].append({"id": tiny.VOCAB + index, "content": marker, "special": index % 2 == 0, **FLAGS, **flags})
    tokenizer = FastTokenizer.from_str(json.dumps(content))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    return tokenizer


def sentence_piece(path: Path) -> FastTokenizer:
    path.mkdir()
    return gguf.fast_tokenizer(test_gguf_tokenizer.sentence_piece(path / "m.gguf"))


def byte_level(path: Path) -> FastTokenizer:
    path.mkdir()
    return gguf.fast_tokenizer(test_gguf_tokenizer.byte_level(path / "m.gguf", "qwen2"))


def stripping(path: Path) -> FastTokenizer:
    return marked(path, lstrip=True, rstrip=True)


def lower_case(path: Path) -> FastTokenizer:
    return marked(path, normalizers.Lowercase())


def composing(path: Path) -> FastTokenizer:
    return marked(path, normalizers.Sequence([normalizers.NFKC(), normalizers.Replace("  ", " ")]))


def prefixed(path: Path) -> FastTokenizer:
    return marked(path, None, pre_tokenizers.ByteLevel(add_prefix_space=True))


KINDS: list[Callable[[Path], FastTokenizer]] = [
    demo, marked, stripping, lower_case, composing, prefixed, byte_level, sentence_piece,
]  # fmt: skip


class Forced:
    """A compiler with one tokenizer. `ends` are the tokens that end texts."""

    def __init__(self, tokenizer: FastTokenizer, path: Path, ends: list[str]) -> None:
        path.mkdir(exist_ok=True)
        tokenizer.save(str(path / "tokenizer.json"))
        self.tokenizer, self.vocab = tokenizer, tokenizer.get_vocab_size()
        self.eos = [id for end in ends if (id := tokenizer.token_to_id(end)) is not None]
        self.compiler = LLGuidanceCompiler(path, self.vocab, self.eos)

    def written(self, spec: GrammarSpec, dice: random.Random) -> bytes:
        """The text of one walk under the masks."""
        matcher, output = self.compiler.compile(spec), list[int]()
        row = np.zeros(-(-self.vocab // 32), dtype=np.int32)
        for _ in range(400):
            assert matcher.mask([], row)
            choices = allowed(row)
            # the second may differ: a tokenizer need not cut the rest of a text as it cuts the whole
            assert choices == forced[:1] if (forced := matcher.forced([], 5)) else choices, "the mask allows what is forced"
            if matcher.complete:
                break
            token = dice.choice(choices)
            matcher.commit([token])
            output.append(token)
        hidden = {id for id, token in self.tokenizer.get_added_tokens_decoder().items() if token.special}
        assert hidden.isdisjoint(output), "a text has no special token"
        return self.compiler._tokenizer.decode_bytes(output)


def allowed(row: Any) -> list[int]:
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()


def texts(tokenizer: FastTokenizer, dice: random.Random) -> list[str]:
    added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    parts = [*added, *(token[:-1] for token in added), " ", "  ", "x", " The end", "Grüße", "e\u0301", "ﬁ", "世界", "<", "|>", "7", "\n"]
    several = ["".join(dice.choice(parts) for _ in range(dice.randrange(1, 7))) for _ in range(25)]
    return [text for text in [*(f"x {token} y" for token in added), *several] if text]


@pytest.mark.parametrize("kind", KINDS)
def test_a_forced_text_is_written_as_it_is(kind: Callable[[Path], FastTokenizer], tmp_path: Path) -> None:
    dice = random.Random(kind.__name__)
    forced = Forced(kind(tmp_path / "made"), tmp_path / "used", ["<|end_of_text|>", tiny.EOS, "<|im_start|>", "</think>"])
    for text in texts(forced.tokenizer, dice):
        assert forced.written(GrammarSpec("choice", json.dumps([text])), dice) == text.encode()
        schema = {"type": "object", "properties": {text: {"enum": [text, f"{text}!"]}}, "required": [text], "additionalProperties": False}
        written = json.loads(forced.written(GrammarSpec("json_schema", json.dumps(schema)), dice))
        assert written in ({text: text}, {text: f"{text}!"})


def test_a_grammar_may_name_special_tokens(tmp_path: Path) -> None:
    forced = Forced(marked(tmp_path / "made"), tmp_path / "used", [tiny.EOS])
    matcher = forced.compiler.compile(GrammarSpec("ebnf", 'start: "x" <|im_start|> "y" <tool_call> "z"'))
    matcher.commit([forced.tokenizer.token_to_id(token) for token in ("x", "<|im_start|>", "y", "<tool_call>", "z")])
    assert matcher.complete


def test_a_token_that_ends_texts_ends_none_before_its_grammar(tmp_path: Path) -> None:
    forced = Forced(marked(tmp_path / "made"), tmp_path / "used", [tiny.EOS])
    matcher = forced.compiler.compile(GrammarSpec("ebnf", f'start: "x" {tiny.EOS} "y"'))
    matcher.commit([forced.tokenizer.token_to_id("x")])
    row = np.zeros(-(-forced.vocab // 32), dtype=np.int32)
    assert matcher.mask([], row) and not allowed(row)


def test_no_piece_of_a_cut_text_contains_a_special_one() -> None:
    cuts = after_first_letter(["<|a|>", "<|a|>b", "|>b", "[x]"])
    assert cuts.split("1<|a|>b[x]<|a") == ["1<", "|a|", ">b[", "x]<|a"]
    assert after_first_letter([]).split("<|a|>") == ["<|a|>"]
