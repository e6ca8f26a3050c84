"""Text that arrives token by token is the text of all tokens, never splits a character, and ends exactly at a stop string."""

from __future__ import annotations

import random

import pytest
from tokenizers import Tokenizer as FastTokenizer, decoders, models

from mtpserve.core.sampling import SamplingParams
from mtpserve.text.detokenizer import MAX_PENDING, REPLACEMENT, Detokenizer, overlap
from mtpserve.text.tokenizer import Tokenizer
from tests.text import tiny

TEXT = "def f():\n    return 'Grüße, 世界! 🎉🎊'  # the end\n"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(tiny.write(tmp_path_factory.mktemp("tokenizer")))


def runs(tokens: list[int], rng: random.Random) -> list[list[int]]:
    """`tokens` as the engine yields them: 0 to 4 at a time."""
    result = []
    while tokens:
        count = rng.randrange(5)
        result.append(tokens[:count])
        tokens = tokens[count:]
    return result


def collect(detokenizer: Detokenizer, pushes: list[list[int]]) -> tuple[list[str], int, bool]:
    """Texts, tokens used, stopped."""
    texts, used = [], 0
    for tokens in pushes:
        delta = detokenizer.push(tokens)
        texts.append(delta.text)
        used += delta.tokens_used
        if delta.stopped:
            return texts, used, True
    return [*texts, detokenizer.finish()], used, False


@pytest.mark.parametrize("seed", range(20))
def test_the_parts_are_the_whole_and_no_character_is_split(tokenizer: Tokenizer, seed: int) -> None:
    tokens = tokenizer.encode(TEXT, special=False)
    texts, used, stopped = collect(Detokenizer(tokenizer.fast, SamplingParams()), runs(tokens, random.Random(seed)))
    assert "".join(texts) == TEXT
    assert (used, stopped) == (len(tokens), False)
    assert not any(REPLACEMENT in text for text in texts)


@pytest.mark.parametrize("skip", [True, False])
def test_broken_output_is_the_same_in_parts_and_is_not_held_back(tokenizer: Tokenizer, skip: bool) -> None:
    rng = random.Random(0)
    broken = [token for token in range(2, tiny.VOCAB) if REPLACEMENT in tokenizer.decode([token])]
    for _ in range(300):
        tokens = [rng.choice(broken) if rng.random() < 0.8 else rng.randrange(tiny.VOCAB) for _ in range(rng.randrange(80))]
        detokenizer = Detokenizer(tokenizer.fast, SamplingParams(skip_special_tokens=skip))
        texts, _, _ = collect(detokenizer, runs(tokens, rng))
        assert "".join(texts) == tokenizer.decode(tokens, skip_special_tokens=skip)
    detokenizer = Detokenizer(tokenizer.fast, SamplingParams())
    shown = sum(len(detokenizer.push([broken[0]]).text) for _ in range(200))
    assert shown >= 200 - MAX_PENDING


@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize("seed", range(10))
def test_a_stop_string_ends_the_text_inside_a_run(tokenizer: Tokenizer, seed: int, include: bool) -> None:
    """Whatever the runs, the text is the same, and of the tokens those up to the one that completes the stop string count."""
    tokens = tokenizer.encode(TEXT, special=False)
    stop = "世界! 🎉"
    needed = next(n for n in range(len(tokens)) if stop in tokenizer.decode(tokens[:n]))
    sampling = SamplingParams(stop=("never", stop, "the end"), include_stop=include)
    texts, used, stopped = collect(Detokenizer(tokenizer.fast, sampling), runs(tokens, random.Random(seed)))
    assert "".join(texts) == TEXT[: TEXT.index(stop)] + (stop if include else "")
    assert (used, stopped) == (needed, True)


def test_what_may_become_a_stop_string_is_held_back_and_released(tokenizer: Tokenizer) -> None:
    sampling = SamplingParams(stop=("aab",))
    detokenizer = Detokenizer(tokenizer.fast, sampling)
    a, b, c = (tokenizer.encode(letter, special=False) for letter in "abc")
    assert [detokenizer.push(token).text for token in (a, a, a, c, a)] == ["", "", "a", "aac", ""]
    assert detokenizer.finish() == "a"
    detokenizer = Detokenizer(tokenizer.fast, sampling)
    assert detokenizer.push(a + a + a + b + c).text == "a"
    assert detokenizer.finish() == ""


def test_the_first_stop_string_in_the_text_wins(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("x the end", special=False)
    texts, _, _ = collect(Detokenizer(tokenizer.fast, SamplingParams(stop=("end", "the"))), [tokens])
    assert "".join(texts) == "x "


def test_stop_tokens_end_the_text_and_hide(tokenizer: Tokenizer) -> None:
    a, b = tokenizer.encode("a", special=False), tokenizer.encode("b", special=False)
    for sampling, tokens, text, used in (
        (SamplingParams(), [*a, tiny.EOS_ID, *b], "a", 2),
        (SamplingParams(skip_special_tokens=False), [*a, tiny.EOS_ID, *b], "a", 2),
        (SamplingParams(skip_special_tokens=False, include_stop=True), [*a, tiny.EOS_ID, *b], "a" + tiny.EOS, 2),
        (SamplingParams(ignore_eos=True), [*a, tiny.EOS_ID, *b], "ab", 3),
        (SamplingParams(stop_token_ids=tuple(b)), [*a, *b, *a], "a", 2),
        (SamplingParams(stop_token_ids=tuple(b), include_stop=True), [*a, *b, *a], "ab", 2),
        (SamplingParams(stop=("ab",), stop_token_ids=(5,)), [*a, 5], "a", 2),  # held back for the stop string, then shown
    ):
        texts, count, _ = collect(Detokenizer(tokenizer.fast, sampling, (tiny.EOS_ID,)), [tokens])
        assert ("".join(texts), count) == (text, used)


def test_an_unfinished_character_is_shown_at_the_end(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("x🎉", special=False)
    texts, _, _ = collect(Detokenizer(tokenizer.fast, SamplingParams()), [[token] for token in tokens[:-1]])
    assert "".join(texts) == "x" + REPLACEMENT


def test_a_leading_space_behind_a_prompt_stays() -> None:
    """Sentence-piece style decoders drop the text's first space; behind a prompt it is not the first."""
    fast = FastTokenizer(models.BPE({"▁a": 0, "▁b": 1}, []))
    fast.decoder = decoders.Metaspace()
    assert Detokenizer(fast, SamplingParams()).push([1, 0]).text == "b a"
    assert Detokenizer(fast, SamplingParams(), prompt=[0]).push([1, 0]).text == " b a"


def test_overlap() -> None:
    assert [overlap(text, "abab") for text in ("", "x", "xa", "xab", "aba", "abb", "abab")] == [0, 0, 1, 2, 3, 0, 2]


def test_of_stop_strings_that_end_together_the_one_that_begins_first_wins(tokenizer: Tokenizer) -> None:
    for stop in (("abc", "bc"), ("bc", "abc")):
        tokens = tokenizer.encode("x abc", special=False)
        texts, _, _ = collect(Detokenizer(tokenizer.fast, SamplingParams(stop=stop)), [tokens])
        assert "".join(texts) == "x "
