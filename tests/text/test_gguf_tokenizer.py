"""Tokenizers from GGUF files: text is split as transformers' conversion splits it, or as the published tokenizers do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import Tokenizer as FastTokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

from mtpserve.core.errors import LoadError
from mtpserve.core.sampling import GrammarSpec
from mtpserve.text.grammars.grammar import LLGuidanceCompiler
from mtpserve.text.tokenizer import Tokenizer

TEXTS = [
    "def read_lines(path):\n    with open(path) as file:\n        return 12345 + 67 * file.readlines()\n\n\n",
    "We'LL see: it's 2024, isn't it?  Grüße, 世界! 🎉   Cafe\u0301 — the end...\r\n\tof (the) line  ",
    "x=1_000_000;;; 3.14159 ٣٤ ½ \u00a0 HTTPServer2Go __init__ 'tis",
    "",
]
BEGIN, END, THINK = "<|begin|>", "<|end|>", "<think>"
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{{ eos_token }}{% endfor %}"


def byte_level(path: Path, split: str | None, **entries: Any) -> Path:
    """Its merges cross all boundaries that a way to split text may set, so that they show it."""
    trained = FastTokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=[BEGIN, END, THINK], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    trained.train_from_iterator([piece for text in TEXTS for piece in text.splitlines(True)] * 3, trainer)
    vocab = trained.get_vocab()
    tokens = sorted(vocab, key=vocab.__getitem__)
    merges = json.loads(trained.to_str())["model"]["merges"]
    return write(
        path, "gpt2", split, tokens, [3, 3, 4] + [1] * (len(tokens) - 3), **({"merges": [" ".join(merge) for merge in merges]} | entries)
    )


def sentence_piece(path: Path, with_merges: bool = False, **entries: Any) -> Path:
    trained = FastTokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(TEXTS * 3, trainers.BpeTrainer(vocab_size=300, show_progress=False))
    pieces = sorted(trained.get_vocab(), key=trained.get_vocab().__getitem__)
    tokens = ["<unk>", BEGIN, END, THINK, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    kinds = [2, 3, 3, 4] + [6] * 256 + [1] * len(pieces)
    scores = [0.0] * 260 + [-float(i) for i in range(len(pieces))]
    if with_merges:
        entries["merges"] = [" ".join(merge) for merge in json.loads(trained.to_str())["model"]["merges"]]
    ends = {"tokenizer.ggml.unknown_token_id": 0, "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2}
    return write(path, "llama", "default", tokens, kinds, scores=scores, **(ends | entries))


def write(path: Path, model: str, split: str | None, tokens: list[str], kinds: list[int], **entries: Any) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    if split is not None:
        writer.add_tokenizer_pre(split)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    defaults: dict[str, Any] = {"tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.eos_token_id": 1, "tokenizer.chat_template": TEMPLATE}
    for key, value in (defaults | {k if "." in k else f"tokenizer.ggml.{k}": v for k, v in entries.items()}).items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            (writer.add_string if isinstance(value, str) else writer.add_uint32)(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def same(path: Path, theirs: Any, texts: list[str]) -> None:
    ours = Tokenizer(path)
    for text in texts:
        ids = ours.encode(text, special=False)
        assert ids == theirs(text), text
        assert ours.decode(ids) == text


@pytest.mark.parametrize("split", ["llama-bpe", "tekken"])
def test_byte_level_as_transformers_does(tmp_path: Path, split: str) -> None:
    path = byte_level(tmp_path / "a.gguf", split)
    theirs = AutoTokenizer.from_pretrained(str(tmp_path), gguf_file="a.gguf")
    marked = ["".join((BEGIN, text, THINK, text, END)) for text in TEXTS]
    ours = Tokenizer(path)
    ours.fast.model.ignore_merges = False  # theirs do not take whole words, as the published tokenizers do
    for text in TEXTS + marked:
        assert ours.encode(text, special=False) == theirs.encode(text, add_special_tokens=False), text
        assert ours.decode(ours.encode(text), skip_special_tokens=False).endswith(text)


def test_qwen_composes_characters(tmp_path: Path) -> None:
    """Its published tokenizer does, and transformers' conversion does not."""
    ours = Tokenizer(byte_level(tmp_path / "a.gguf", "qwen2"))
    theirs = AutoTokenizer.from_pretrained(str(tmp_path), gguf_file="a.gguf")
    for text in TEXTS:
        composed = text.replace("e\u0301", "é")
        assert ours.encode(text) == theirs.encode(composed, add_special_tokens=False)
        assert ours.decode(ours.encode(text)) == composed


@pytest.mark.parametrize(("split", "digits"), [("smollm", True), ("gpt-2", False)])
def test_byte_level_as_published(tmp_path: Path, split: str, digits: bool) -> None:
    path = byte_level(tmp_path / "a.gguf", split)
    published = FastTokenizer.from_str(Tokenizer(path).fast.to_str())
    by_byte = pre_tokenizers.ByteLevel(add_prefix_space=False)
    published.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), by_byte]) if digits else by_byte
    published.decoder = decoders.ByteLevel()
    same(path, lambda text: published.encode(text, add_special_tokens=False).ids, TEXTS)
    number = Tokenizer(path).encode("12345")
    assert (len(number) == 5) == digits


def test_a_word_that_is_a_token_is_taken_whole(tmp_path: Path) -> None:
    """Llama 3 has tokens that its merges do not make."""
    split = write(tmp_path / "a.gguf", "gpt2", "llama-bpe", [BEGIN, END, "a", "b", "c", "abc", "ab"], [3, 3, 1, 1, 1, 1, 1], merges=["a b"])
    assert Tokenizer(split).encode("abc", special=False) == [5]


@pytest.mark.parametrize("with_merges", [False, True])
def test_sentence_piece(tmp_path: Path, with_merges: bool) -> None:
    path = sentence_piece(tmp_path / "a.gguf", with_merges)
    theirs = AutoTokenizer.from_pretrained(str(tmp_path), gguf_file="a.gguf")
    same(path, lambda text: theirs.encode(text, add_special_tokens=False), [text for text in TEXTS if not text.startswith(" ")])
    ours = Tokenizer(path)
    assert ours.encode("the")[0] == 1 and ours.token_bytes(4 + 0xC3) == b"\xc3"
    assert ours.decode(ours.encode("🎉 is bytes")) == "🎉 is bytes"


def test_sentence_piece_without_a_space_before(tmp_path: Path) -> None:
    ours = Tokenizer(sentence_piece(tmp_path / "a.gguf", add_space_prefix=False, add_bos_token=False))
    assert ours.decode(ours.encode(" the line")) == " the line"
    assert ours.encode("the") != ours.encode(" the")


def test_special_tokens(tmp_path: Path) -> None:
    plain = Tokenizer(byte_level(tmp_path / "a.gguf", "smollm"))
    both = Tokenizer(byte_level(tmp_path / "b.gguf", "smollm", add_bos_token=True, add_eos_token=True))
    ids = plain.encode("the")
    assert both.encode("the") == [0, *ids, 1] and both.encode("the", special=False) == ids
    assert plain.special_ids == {0, 1} and plain.hidden_ids == {0, 1}
    assert plain.encode(f"{THINK}{END}") == [2, 1] and plain.decode([2, 1]) == THINK
    assert Tokenizer(byte_level(tmp_path / "c.gguf", "llama-bpe")).encode("the")[0] == 0  # where the file does not say


def test_chat_templates_and_recommendations(tmp_path: Path) -> None:
    sampling = {"general.sampling.temp": 0.5, "general.sampling.top_k": 20, "general.sampling.penalty_repeat": 1.5}
    chat = Tokenizer(byte_level(tmp_path / "a.gguf", "smollm", **sampling))
    assert chat.render_chat([{"role": "user", "content": "hi"}]).text == f"user: hi{END}"
    assert chat.defaults == {"temperature": 0.5, "top_k": 20}
    assert Tokenizer(tmp_path / "a.gguf", recommends=False).defaults == {}
    several = {"tokenizer.chat_templates": ["tool_use"], "tokenizer.chat_template.tool_use": "tools"}
    named = Tokenizer(byte_level(tmp_path / "b.gguf", "smollm", **several))
    assert named.render_chat([{"role": "user", "content": "hi"}], tools=[]).text == "tools"
    assert named.render_chat([{"role": "user", "content": "hi"}]).text == f"user: hi{END}"


@pytest.mark.parametrize("make", [sentence_piece, lambda path: byte_level(path, "smollm")], ids=["sentence piece", "byte level"])
def test_grammars(tmp_path: Path, make: Any) -> None:
    path = make(tmp_path / "a.gguf")
    tokenizer = Tokenizer(path)
    matcher = LLGuidanceCompiler(path, tokenizer.fast.get_vocab_size(), (1,)).compile(GrammarSpec("regex", "the (end|line)"))
    matcher.commit([next(id for id in range(4, tokenizer.fast.get_vocab_size()) if tokenizer.token_bytes(id) == b"t")])
    with pytest.raises(ValueError, match="does not allow"):
        matcher.commit([1])


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"split": "klingon"}, r'tokenizer.ggml.pre = "klingon" is not supported; supported: llama-bpe'),
        ({"split": None}, "tokenizer.ggml.pre is missing; it must be a string"),
        ({"tokenizer.ggml.bos_token_id": "first"}, "tokenizer.ggml.bos_token_id must be an integer, got 'first'"),
        ({"merges": ["zz top"]}, "its tokenizer cannot be made: Error while initializing BPE: Token `zz` out of vocabulary"),
        ({"tokenizer.chat_template": 7}, "tokenizer.chat_template must be a string, got 7"),
    ],
)
def test_what_is_refused(tmp_path: Path, entries: dict[str, Any], message: str) -> None:
    path = byte_level(tmp_path / "a.gguf", **({"split": "smollm"} | entries))
    with pytest.raises(LoadError, match=f"a.gguf: {message}"):
        Tokenizer(path)


def test_a_file_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"tokenizer.ggml.tokens is missing; it must be an array of strings"):
        Tokenizer(write(tmp_path / "a.gguf", "gpt2", "smollm", [], []))


def test_another_kind_of_tokenizer_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", "bert", "jina", ["a", "b"], [1, 1])
    with pytest.raises(LoadError, match=r'tokenizer.ggml.model = "bert" is not supported; supported: gpt2'):
        Tokenizer(path)
