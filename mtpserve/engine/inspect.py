"""What a checkpoint is and what it would take, from its headers alone."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from mtpserve.config import EngineConfig, SpecConfig
from mtpserve.core.arch import ModelArch
from mtpserve.core.errors import NoRoom
from mtpserve.engine.planning import describe, empty_model, plan
from mtpserve.engine.storage import Storage
from mtpserve.spec.token_map import TokenMap, count_tokens, make_token_map


@dataclass(frozen=True, slots=True)
class InspectReport:
    arch: ModelArch
    mtp_prefix: str | None
    weights: list[tuple[str, int, int, str, int]]  # group, tensors, parameters, dtype, bytes in the checkpoint
    memory: list[tuple[str, int]]
    notes: list[str]

    @property
    def tensors(self) -> list[tuple[str, str]]:
        """The names of the MTP layer's tensors, as a row of the table of the architecture; no row where there is no such layer."""
        return [("mtp.tensors", f"{self.mtp_prefix}*" if self.mtp_prefix else "-")] if self.arch.mtp is not None else []

    def as_json(self) -> dict[str, Any]:
        weights = [dict(zip(("group", "tensors", "parameters", "dtype", "bytes"), row, strict=True)) for row in self.weights]
        memory = [dict(zip(("what", "bytes"), row, strict=True)) for row in self.memory]
        return {"arch": asdict(self.arch), "mtp_prefix": self.mtp_prefix, "weights": weights, "memory": memory, "notes": self.notes}


def inspect_model(config: EngineConfig) -> InspectReport:
    """With the MTP layer if there is one, whether or not speculation was asked for; also of a model that does not fit into this machine.
    Raises LoadError and ConfigError."""
    plain = describe(config, want_mtp=False)
    notes = []
    if config.spec.speculative_algorithm is None and plain.layout is not None and plain.layout.count == 1:
        config = replace(config, spec=SpecConfig(speculative_algorithm="MTP"))
    try:
        planned = plan(config)
    except NoRoom as error:
        tokens = config.model.context_length or plain.arch.max_positions
        notes.append(f"does not fit here: {error}. The memory plan is one for a single request of {tokens:,} tokens")
        planned = plan(for_one(config, tokens))
    described, dtype, device, memory = planned.described, planned.dtype, planned.device, planned.memory
    if described.arch.mtp is None:
        notes.append("no MTP layer: plain decoding only")
    notes.append(f"planned for {str(dtype).removeprefix('torch.')} on {device}: {memory.counted} pages of {config.cache.page_size} tokens, "
                 f"up to {memory.max_running} requests at once, {config.spec.steps} drafts per step")  # fmt: skip
    groups: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0, 0])
    for checkpoint in filter(None, (described.checkpoint, described.nextn)):
        for name, entry in checkpoint.tensors.items():
            prefix = described.nextn_prefix if checkpoint is described.nextn else (described.layout.prefix if described.layout else None)
            row = groups[group_of(name, prefix), str(entry.dtype)]
            for i, amount in enumerate((1, math.prod(entry.shape), entry.size)):
                row[i] += amount
    if described.dummy:
        notes.append("dummy weights: the tensors are those of the model in memory, there is no checkpoint")
        for name, parameter in empty_model(described, dtype, 1, Storage(False, dtype)).named_parameters():
            row = groups[group_of(name, described.mtp_prefix), str(parameter.dtype).removeprefix("torch.")]
            for i, amount in enumerate((1, parameter.numel(), parameter.nbytes)):
                row[i] += amount
    weights = [(group, row[0], row[1], dtype_name, row[2]) for (group, dtype_name), row in sorted(groups.items())]
    return InspectReport(described.arch, described.mtp_prefix, weights, memory.rows, notes)


def for_one(config: EngineConfig, tokens: int) -> EngineConfig:
    """Room for one request of so many tokens, whatever the machine has."""
    alone = replace(config.scheduler, max_running_requests=1)
    return replace(config, scheduler=alone, cache=replace(config.cache, max_total_tokens=tokens, mem_fraction_static=None))


def token_map(config: EngineConfig, size: int, texts: Sequence[str]) -> TokenMap:
    """Of the model's own tokenizer. The tokens that end a text, and special ones, are always in it."""
    from mtpserve.text.tokenizer import tokenizer_of

    arch = describe(config, want_mtp=False).arch
    tokenizer = tokenizer_of(config.model)
    counts = count_tokens(lambda text: tokenizer.encode(text, special=False), texts)
    return make_token_map(counts, size, arch.vocab, {*arch.eos_ids, *tokenizer.special_ids})


def group_of(name: str, mtp_prefix: str | None) -> str:
    if mtp_prefix and name.startswith(mtp_prefix):
        copied = name.endswith(("embed_tokens.weight", "shared_head.head.weight"))
        return "MTP layer: copies of embedding and head, not loaded" if copied else "MTP layer"
    for part, group in (
        (".self_attn.", "attention"),
        (".attention.", "attention"),
        (".experts.", "experts"),
        (".mlp.", "feed-forward"),
        ("embed", "embedding"),
    ):
        if part in name:
            return group
    return "head" if name.startswith(("lm_head", "head.")) else "norms"
