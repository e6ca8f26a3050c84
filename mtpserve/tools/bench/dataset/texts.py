"""Texts of a given number of tokens. What a tokenizer decodes does not always encode to the same tokens; here
the text is changed until its count is right."""

from __future__ import annotations

from random import Random

from mtpserve.core.errors import ConfigError
from mtpserve.tools.bench.dataset.tokenizing import BenchTokenizer

SAMPLED = 8192  # tokens of the vocabulary that are tried
ROUNDS = 24


class TextMaker:
    """`chat`: prompts are messages, and what the template adds counts."""

    def __init__(self, tokenizer: BenchTokenizer, random: Random, *, chat: bool = False) -> None:
        self._tokenizer, self._random, self._chat = tokenizer, random, chat
        self._words = plain_words(tokenizer, random)

    def count(self, text: str) -> int:
        return self._tokenizer.prompt_tokens(text, self._chat)

    def plain(self, text: str) -> int:
        return len(self._tokenizer.encode(text))

    def words(self, tokens: int) -> str:
        """Random words, about as many tokens."""
        return "".join(self._random.choices(self._words, k=tokens))

    def exactly(
        self, tokens: int, before: str = "", source: str | None = None, *, part_of_prompt: bool = False
    ) -> tuple[str, int]:
        """A text that begins with `before` and has `tokens` tokens, and the count that was reached: it
        differs where there is no such text near. `source`: text to take the rest from, over and over, instead
        of random words. `part_of_prompt`: only the text's own tokens count."""
        count_of = self.plain if part_of_prompt else self.count
        ids = list(self._tokenizer.encode(source)) if source else []
        best = (before, count_of(before))
        filler, draft_depth = "", tokens - best[1]
        for _ in range(ROUNDS):
            if best[1] == tokens or draft_depth < 1:
                break
            filler = (
                self._tokenizer.decode((ids * (draft_depth // len(ids) + 1))[:draft_depth])
                if ids
                else self._resized(filler, draft_depth)
            )
            count = count_of(before + filler)
            if abs(count - tokens) < abs(best[1] - tokens):
                best = (before + filler, count)
            draft_depth += tokens - count
        return best

    def _resized(self, filler: str, tokens: int) -> str:
        token_ids = list(self._tokenizer.encode(filler))
        if len(token_ids) > tokens:
            return self._tokenizer.decode(token_ids[:tokens])
        return filler + self.words(tokens - len(token_ids))


def plain_words(tokenizer: BenchTokenizer, random: Random) -> list[str]:
    """Texts of single tokens that are themselves again when encoded: words after a blank where there are
    such, since those do not join with their neighbours."""
    tried = random.sample(range(tokenizer.size), min(SAMPLED, tokenizer.size))
    texts = [
        (token, text)
        for token in tried
        if (text := tokenizer.token_text(token)) and text.isascii() and text.isprintable()
    ]
    words = [
        text
        for token, text in texts
        if text[0] == " " and text[1:].isalpha() and list(tokenizer.encode(text)) == [token]
    ]
    if len(words) >= 16:
        return words
    # A tokenizer whose tokens do not begin with blanks: words with one before.
    words = [" " + text for _, text in texts if text.strip().isalnum()]
    if not words:
        raise ConfigError(
            "--tokenizer has no printable tokens to make prompts of: use --dataset-name random-ids"
        )
    return words
