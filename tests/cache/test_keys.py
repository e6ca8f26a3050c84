"""The keys of pages: what they depend on, and that they depend on all of it."""

from __future__ import annotations

from mtpserve.cache.keys import Key, extend, root

PAGE, MODEL = 4, root(b"model")


def keys(tokens: list[int], start: Key = MODEL) -> list[Key]:
    made: list[Key] = []
    extend(made, start, tokens, len(tokens), PAGE)
    return made


def test_a_key_depends_on_all_tokens_up_to_its_page_s_end() -> None:
    one, other = keys([1, 2, 3, 4, 5, 6, 7, 8]), keys([0, 2, 3, 4, 5, 6, 7, 8])
    assert len(one) == 2 and not set(one) & set(other)
    assert keys([1, 2, 3, 4, 5, 6, 7, 8, 9]) == one, "a page that is not full has none"


def test_keys_go_on_where_they_ended() -> None:
    made = keys([1, 2, 3, 4])
    extend(made, MODEL, [1, 2, 3, 4, 5, 6, 7, 8], 8, PAGE)
    assert made == keys([1, 2, 3, 4, 5, 6, 7, 8])


def test_models_and_salts_share_nothing() -> None:
    starts = [root(b"ab", "c"), root(b"a", "bc"), root(b"abc"), root(b"ab"), root(b"ab", "d")]
    assert len({keys([1, 2, 3, 4], start)[0] for start in starts}) == len(starts)
