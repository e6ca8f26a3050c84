"""The model's tokenizer, as far as a load generator needs one. Imports transformers; no torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mtpserve.config import EngineConfig, ModelConfig
from mtpserve.core.errors import MTPServeError
from mtpserve.weights.checkpoint.gguf_names import PACKAGES


class BenchTokenizer:
    """Raises LoadError where `name` is neither a directory with a tokenizer nor a model on the hub."""

    def __init__(self, name: str) -> None:
        from mtpserve.text.tokenizer import tokenizer_of
        from mtpserve.weights.checkpoint.hub import fetched

        # "dummy": only the tokenizer's files are downloaded.
        self._tokenizer = tokenizer_of(
            fetched(EngineConfig(model=ModelConfig(model=name, load_format="dummy"))).model
        )
        self._hidden = self._tokenizer.special_ids | self._tokenizer.hidden_ids
        self.name = name

    @property
    def size(self) -> int:
        return int(self._tokenizer.fast.get_vocab_size())

    def token_text(self, token: int) -> str | None:
        """Returns the token's text; None if it is special, or no whole character."""
        if token in self._hidden:
            return None
        text = self._tokenizer.token_text(token)
        return None if text.startswith("bytes:") else text

    def encode(self, text: str) -> Sequence[int]:
        return self._tokenizer.encode(text, special=False)

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids)

    def count(self, text: str) -> int:
        return len(self.encode(text))

    def prompt_tokens(self, text: str, chat: bool) -> int:
        """Returns the tokens that a server counts for this prompt, with those of the chat template, or those
        that the model expects around it."""
        if chat and self._tokenizer.has_chat_template:
            return len(
                self._tokenizer.encode_chat(self._tokenizer.render_chat([{"role": "user", "content": text}]))
            )
        return len(self._tokenizer.encode(text))


def tokenizer_at(name: str | None, model: str | None, root: str | None) -> BenchTokenizer | None:
    """The one that is named, and else the model's if it is at hand: `model` by its directory, as `demo` or
    from the hub's cache, `root` where the server says that it has it. Raises LoadError for `name` alone."""
    if name is not None:
        return BenchTokenizer(name)
    for source in (model, root):
        if source is not None and (
            source in ("demo", *PACKAGES)
            or (Path(source) / "tokenizer.json").is_file()
            or "/" in source.strip("/")
        ):
            try:
                return BenchTokenizer(source)
            except MTPServeError:
                continue
    return None
