"""The keys of pages: a hash of everything that a page's contents depend on.

    key of column c = hash(key of column c - 1, tokens of column c)
    key of column -1 = hash(salt, model, number format, …)

A page depends on the tokens up to its end and on nothing else, so pages with equal keys have equal contents:
in this pool, in another tier, in another engine. 128 bits: a collision would need 2^64 pages.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

Key = bytes
SIZE = 16


def root(fingerprint: bytes, salt: str = "") -> Key:
    """What the key of a first page continues. `fingerprint`: of all that KV depends on besides tokens.
    Different salts share nothing."""
    # The fingerprint has a size of its own, so that no two pairs look alike.
    return blake2b(
        blake2b(fingerprint, digest_size=SIZE).digest() + salt.encode(errors="surrogatepass"),
        digest_size=SIZE,
    ).digest()


def extend(keys: list[Key], start: Key, tokens: Sequence[int], end: int, page_size: int) -> None:
    """Append the keys of the whole pages of `tokens[:end]` that `keys` has not got. `start`: of `root`."""
    key = keys[-1] if keys else start
    for first in range(len(keys) * page_size, end - page_size + 1, page_size):
        key = blake2b(
            key + array("i", tokens[first : first + page_size]).tobytes(), digest_size=SIZE
        ).digest()
        keys.append(key)
