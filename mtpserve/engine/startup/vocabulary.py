"""Whether two models mean the same tokens by the same numbers."""

from __future__ import annotations

import logging
from hashlib import blake2b
from pathlib import Path

from mtpserve.config import ModelConfig
from mtpserve.core.errors import ConfigError
from mtpserve.core.gguf import SUFFIX

log = logging.getLogger(__name__)


def require_same_tokens(model: ModelConfig, draft: Path, vocab: int, drafted: int) -> None:
    """`vocab`, `drafted`: the sizes of their embeddings, which may differ by padding. Raises ConfigError
    naming the first token that differs."""
    readable = draft.suffix == SUFFIX or (draft / "tokenizer.json").is_file()
    if model.numbers_for_text or not readable:
        if drafted != vocab:
            why = "no text is read" if model.numbers_for_text else f"{draft} has no tokenizer.json"
            sizes = f"vocab_size is {drafted}, and the model's is {vocab}"
            raise ConfigError(
                f"--speculative-draft-model-path: {draft}: {sizes}; whether that is padding cannot "
                f"be seen, since {why}"
            )
        if not readable:
            log.warning(
                "%s has no tokenizer.json: that its tokens are the model's is taken for granted", draft
            )
        return
    # Not at the top: it takes a second to import.
    from mtpserve.text.tokenizer import Tokenizer, tokenizer_of

    ours, theirs = tokenizer_of(model), Tokenizer(draft)
    vocab_size, digests = max(vocab, drafted), []
    for tokenizer in (ours, theirs):
        digest = blake2b(digest_size=16)
        for token in range(vocab_size):
            digest.update(tokenizer.token_bytes(token) + b"\0")
        digests.append(digest.digest())
    if digests[0] == digests[1]:
        return
    first = next(
        (token for token in range(vocab_size) if ours.token_bytes(token) != theirs.token_bytes(token)), 0
    )
    differs = (
        f"token {first} is {ours.token_text(first)!r} to the model and {theirs.token_text(first)!r} to "
        f"{draft}"
    )
    raise ConfigError(
        f"--speculative-draft-model-path: the draft model needs the model's tokenizer: {differs}"
    )
