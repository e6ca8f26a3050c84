"""The draft model that the options name: how many MTP layers it has, or a checkpoint of its own, which must
mean the same tokens by the same numbers."""

from __future__ import annotations

import logging
import re
from hashlib import blake2b
from pathlib import Path
from typing import cast

from mtpserve.config import EngineConfig, ModelConfig, SpecConfig
from mtpserve.config.drafters import DRAFTERS
from mtpserve.core.arch.model import ModelArch
from mtpserve.core.errors import ConfigError
from mtpserve.core.gguf import SUFFIX
from mtpserve.heads.head import Head, HeadSource
from mtpserve.models.family import Family
from mtpserve.weights.checkpoint.layouts import MTPLayout
from mtpserve.weights.rules import Drop, Rule

log = logging.getLogger(__name__)


def drafts_itself(spec: SpecConfig) -> bool:
    """True if the model drafts with an MTP layer: the checkpoint's own, or one in the same layout that was
    published apart."""
    return spec.drafter is not None and DRAFTERS.get(spec.drafter).in_checkpoint(
        spec.speculative_draft_model_path
    )


def mtp_count(config: EngineConfig, family: Family, layout: MTPLayout | None) -> int:
    """Returns the number of MTP layers to load: where each depth has one, those of the drafted depths.
    `layout` None: they are published apart. Of other families' layers the first one drafts at every depth.
    Raises ConfigError."""
    there, steps = 1 if layout is None else layout.count, config.spec.steps
    if not family.modules:
        return 1
    if steps > there and config.spec.depth_told:
        have = f"{config.model.directory} has {there} MTP layers, one for each depth"
        raise ConfigError(f"--speculative-num-steps must be at most {there}, got {steps}: {have}")
    return max(min(steps, there), 1)


def nextn_rules(family: Family, arch: ModelArch, prefix: str) -> list[Rule]:
    """The own tensors of a layer that is published apart; what is outside its prefix is another copy of the
    trunk's."""
    assert family.mtp_rules is not None
    return [
        *family.mtp_rules(arch, prefix),
        Rule(rf"(?!{re.escape(prefix)}).+", None, Drop("a copy of the trunk's")),
    ]


def head_of(config: EngineConfig, trunk: ModelArch) -> Head | None:
    """Opens the draft model that --speculative-draft-model-path names. Returns None if it names none, or
    an MTP layer. Raises LoadError and ConfigError."""
    spec = config.spec
    if spec.drafter is None or spec.speculative_draft_model_path is None or drafts_itself(spec):
        return None
    source, directory = cast(HeadSource, DRAFTERS.get(spec.drafter)), Path(spec.speculative_draft_model_path)
    head = source.open(directory, config, trunk)
    if head.vocab is not None:
        require_same_tokens(config.model, directory, trunk.vocab, head.vocab)
    return head


def require_same_tokens(model: ModelConfig, draft: Path, vocab: int, drafted: int) -> None:
    """`vocab`, `drafted`: the sizes of their embeddings, which may differ by padding. Raises ConfigError
    naming the first token that differs."""
    readable = draft.suffix == SUFFIX or (draft / "tokenizer.json").is_file()
    if model.numbers_for_text or not readable:
        if drafted != vocab:
            why = "no text is read" if model.numbers_for_text else f"{draft} has no tokenizer.json"
            sizes = f"vocab_size is {drafted}, and the model's is {vocab}"
            raise ConfigError(
                f"--speculative-draft-model-path: {draft}: {sizes}; this may be padding, but it "
                f"cannot be checked: {why}"
            )
        if not readable:
            log.warning("%s has no tokenizer.json: its tokens are assumed to be the model's", draft)
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
        "--speculative-draft-model-path: the draft model must have the same tokenizer as the model: "
        f"{differs}"
    )
