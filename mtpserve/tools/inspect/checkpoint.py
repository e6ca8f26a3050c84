"""What a checkpoint is and what it would take, from its headers alone."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from mtpserve.config import EngineConfig
from mtpserve.core.arch.model import ModelArch
from mtpserve.core.errors import ConfigError, NoRoom
from mtpserve.engine.startup.drafter import plan_engine
from mtpserve.engine.startup.planning import DRAFT, Described, describe, empty_model, sources
from mtpserve.engine.startup.storage import Storage
from mtpserve.heads.kinds import HEADS, algorithm_of
from mtpserve.spec.draft.token_map import TokenMap, count_tokens, make_token_map
from mtpserve.weights.plan import plan as placements


@dataclass(frozen=True, slots=True)
class InspectReport:
    arch: ModelArch
    mtp_prefix: str | None
    # group, tensors, parameters, dtype or format, bytes in the checkpoint
    weights: list[tuple[str, int, int, str, int]]
    memory: list[tuple[str, int]]
    notes: list[str]
    draft: str | None = None  # the place of a draft model that was published apart and is no MTP layer

    @property
    def tensors(self) -> list[tuple[str, str]]:
        """The place of the draft model's tensors, as a row of the table of the architecture; no row without a
        draft model."""
        if self.draft is not None:
            return [("draft.tensors", f"{self.draft}: *")]
        return (
            [("mtp.tensors", f"{self.mtp_prefix}*" if self.mtp_prefix else "-")]
            if self.arch.mtp is not None
            else []
        )

    def as_json(self) -> dict[str, Any]:
        weights = [
            dict(zip(("group", "tensors", "parameters", "dtype", "bytes"), row, strict=True))
            for row in self.weights
        ]
        memory = [dict(zip(("what", "bytes"), row, strict=True)) for row in self.memory]
        return {
            "arch": asdict(self.arch),
            "mtp_prefix": self.mtp_prefix,
            "weights": weights,
            "memory": memory,
            "notes": self.notes,
        }


def inspect_model(config: EngineConfig) -> InspectReport:
    """Reports on a model with the drafter that an engine would have, even if it does not fit into this
    machine. Raises LoadError and ConfigError."""
    if (kind := algorithm_of(config.model.directory)) in HEADS:
        drafts = "name the model that it drafts for with --model, and this directory before it"
        raise ConfigError(f"{config.model.directory} is {HEADS[kind]}, not a model: {drafts}")
    notes = []
    try:
        engine_plan = plan_engine(config, must_fit=False)
    except NoRoom as error:
        tokens = config.model.context_length or describe(config, want_mtp=False).arch.max_positions
        notes.append(
            f"does not fit here: {error}. The memory plan is one for a single request of {tokens:,} tokens"
        )
        engine_plan = plan_engine(for_one(config, tokens), must_fit=False)
    described, dtype, device, memory, spec = (
        engine_plan.described,
        engine_plan.dtype,
        engine_plan.device,
        engine_plan.memory,
        engine_plan.config.spec,
    )
    notes.append(f"drafter: {engine_plan.drafting}")
    pages = f"{memory.counted} pages of {engine_plan.config.cache.page_size} tokens"
    notes.append(f"planned for {str(dtype).removeprefix('torch.')} on {device}: {pages}, "
                 f"up to {memory.max_running} requests at once, {spec.steps} drafts per step")  # fmt: skip
    if (ranks := config.parallel.ranks) > 1:
        notes.append(f"the memory plan is that of each of {ranks} ranks")
    apart = None if described.head is None else str(described.head.checkpoint.directory)
    if described.head is not None:
        flags = (
            f"--speculative-algorithm {spec.speculative_algorithm} --speculative-draft-model-path "
            f"{spec.checkpoint}"
        )
        notes.append(f"{described.head.arch.kind} fits this model: {flags}")
    if described.dummy:
        notes.append("dummy weights: the tensors are those of the model in memory, there is no checkpoint")
    groups: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0, 0])
    for group, kind, *amounts in (
        in_memory(described, dtype) if described.dummy else in_files(described, dtype)
    ):
        row = groups[group, kind]
        for i, amount in enumerate(amounts):
            row[i] += amount
    weights = [(group, row[0], row[1], kind, row[2]) for (group, kind), row in sorted(groups.items())]
    return InspectReport(described.arch, described.mtp_prefix, weights, memory.rows, notes, apart)


def for_one(config: EngineConfig, tokens: int) -> EngineConfig:
    """Room for one request of so many tokens, whatever the machine has."""
    alone = replace(config.scheduler, max_running_requests=1)
    return replace(
        config,
        scheduler=alone,
        cache=replace(config.cache, max_total_tokens=tokens, mem_fraction_static=None),
    )


# The group of a tensor, by the first pattern that its name has.
GROUPS = {
    re.compile(r"hc_"): "hyper-connections",
    re.compile(r"\.experts\."): "experts",
    re.compile(
        r"\.mlp\.|\.ffn\.|\.mixer\.(?:gate|shared_experts|up_proj|down_proj|fc\d_latent_proj)\."
    ): "feed-forward",
    re.compile(r"\.(?:self_attn|attn|attention|linear_attn|mixer)\."): "attention",
    re.compile(r"embed"): "embedding",
}
Counted = tuple[str, str, int, int, int]  # group, dtype or format, tensors, parameters, bytes


def in_files(described: Described, dtype: torch.dtype) -> Iterator[Counted]:
    """A quantised matrix counts as such, with all of its tensors. Raises LoadError where tensors do not fit
    into the model, as loading does."""
    checkpoints = described.checkpoints
    quantised = {}
    model = empty_model(described, dtype, 1, Storage(False, dtype))
    places = dict(model.named_parameters())
    for one in placements(model, sources(described)):
        if one.format is not None:
            quantised[one.checkpoint.directory, one.name] = one, one.region.of(places[one.target]).numel()
    parts = {
        (one.checkpoint.directory, name)
        for one, _ in quantised.values()
        for name in one.group.tensors.values()
    }
    for checkpoint in checkpoints:
        prefix = (
            described.nextn_prefix
            if checkpoint is described.nextn
            else (described.layout.prefixes if described.layout else None)
        )
        apart = (
            None
            if described.head is None or checkpoint is not described.head.checkpoint
            else described.head.arch.kind
        )
        for name, entry in checkpoint.tensors.items():
            group = apart or group_of(name, prefix)
            if (placement := quantised.get((checkpoint.directory, name))) is not None:
                one, parameters = placement
                assert one.format is not None
                yield group, one.format.label, len(one.group.tensors), parameters, one.size
            elif (checkpoint.directory, name) not in parts:
                yield group, entry.dtype, 1, math.prod(entry.shape), entry.size


def in_memory(described: Described, dtype: torch.dtype) -> Iterator[Counted]:
    for name, parameter in empty_model(described, dtype, 1, Storage(False, dtype)).named_parameters():
        kind = str(parameter.dtype).removeprefix("torch.")
        apart = None if described.head is None or not name.startswith(DRAFT) else described.head.arch.kind
        yield apart or group_of(name, described.mtp_prefix), kind, 1, parameter.numel(), parameter.nbytes


def token_map(config: EngineConfig, size: int, texts: Sequence[str]) -> TokenMap:
    """Returns a token map of the model's own tokenizer. It always has the special tokens and those that end a
    text."""
    from mtpserve.text.tokenizer import tokenizer_of

    arch = describe(config, want_mtp=False).arch
    tokenizer = tokenizer_of(config.model)
    counts = count_tokens(lambda text: tokenizer.encode(text, special=False), texts)
    return make_token_map(counts, size, arch.vocab, {*arch.eos_ids, *tokenizer.special_ids})


def group_of(name: str, mtp_prefix: str | tuple[str, ...] | None) -> str:
    if mtp_prefix and name.startswith(mtp_prefix):
        copied = name.endswith(("embed_tokens.weight", "tok_emb.weight", ".head.weight"))
        return "MTP layer: copies of embedding and head, not loaded" if copied else "MTP layer"
    for pattern, group in GROUPS.items():
        if pattern.search(name):
            return group
    return "head" if name.startswith(("lm_head", "head.")) else "norms"
