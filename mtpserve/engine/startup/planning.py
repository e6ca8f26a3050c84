"""What will be loaded, and how memory will be divided: everything about an engine that is known before a
weight is read."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from mtpserve.config import EngineConfig
from mtpserve.core.arch.model import ModelArch, page_groups
from mtpserve.core.arch.sharding import one_rank
from mtpserve.core.errors import ConfigError, UnsupportedModel
from mtpserve.core.protocols.parallel import ALONE, PlannedRank, Ranks, SpreadExperts, share
from mtpserve.engine.parallel.spread import spread_of, with_ranks
from mtpserve.engine.startup.compute import device_of, dtype_of, kernels_of
from mtpserve.engine.startup.draft_model import drafts_itself, head_of, mtp_count, nextn_rules
from mtpserve.engine.startup.storage import Storage, int8_of, paged, storage_of, with_format
from mtpserve.heads.head import Head
from mtpserve.heads.kinds import require_kind
from mtpserve.layers.decoder import DecoderModel
from mtpserve.layers.devices.lora import LoRASizes, attach, with_adapters
from mtpserve.layers.kernels import KERNELS, Kernels
from mtpserve.layers.linear import Linear
from mtpserve.models.family import Family, arch_of, dummy_layout, without_mtp
from mtpserve.models.registry import family_of
from mtpserve.runtime.device_requests import DeviceRequests
from mtpserve.runtime.memory import Fixed, MemoryPlan, Sizes, plan_memory
from mtpserve.runtime.parallel.rounds import Rounds
from mtpserve.runtime.sampling.rules import LogitRules
from mtpserve.runtime.sampling.sampling import SamplingState
from mtpserve.spec.draft.token_map import read_token_map
from mtpserve.spec.sizes import coupled, spec_sizes
from mtpserve.weights.blocks import hold_blocks
from mtpserve.weights.checkpoint.checkpoint import Checkpoint
from mtpserve.weights.checkpoint.hf import read_config
from mtpserve.weights.checkpoint.hf_config import HFConfig
from mtpserve.weights.checkpoint.layouts import (
    MTPLayout,
    nextn_prefix,
    why_no_mtp,
    with_mtp_layers,
)
from mtpserve.weights.dummy import fill
from mtpserve.weights.loader import load
from mtpserve.weights.plan import WeightSource, plan as placements
from mtpserve.weights.shards import shards_of

log = logging.getLogger(__name__)
DRAFT = "draft."  # the prefix of a separate draft model in the whole model
DRAFTS = (DRAFT, "mtp_head.")


class NoMTPLayer(UnsupportedModel):
    """The model has none, and was to draft with it. `reason` is without the advice."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"{reason}; plain decoding is --speculative-algorithm none")
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Described:
    """A checkpoint as far as headers and config tell. `arch.mtp` is None where no MTP layer is to be loaded,
    and `arch.draft` where no other draft model is."""

    config: HFConfig
    family: Family
    arch: ModelArch
    checkpoint: Checkpoint
    layout: MTPLayout | None  # the layout of the MTP layers inside the checkpoint itself
    nextn: Checkpoint | None  # a separately published one
    nextn_prefix: str | None
    head: Head | None = None  # a draft model of another kind that was published apart
    token_map: list[int] | None = None  # the tokens that drafting looks at; None: all
    dummy: bool = False  # there is no checkpoint but its config
    spread: Rounds | None = None  # who has which experts, where not all are here
    lora: LoRASizes | None = None  # None: no layer has adapters

    @property
    def checkpoints(self) -> list[Checkpoint]:
        """The model's own first."""
        apart = None if self.head is None else self.head.checkpoint
        return [checkpoint for checkpoint in (self.checkpoint, self.nextn, apart) if checkpoint is not None]

    @property
    def floor(self) -> float:
        """The least share of first drafts that a working draft model has accepted."""
        return self.family.floor if self.head is None else self.head.floor

    @property
    def mtp_prefix(self) -> str | None:
        return self.nextn_prefix or (self.layout.prefix if self.layout else None)


def describe(config: EngineConfig, want_mtp: bool) -> Described:
    """Reads config.json and the headers; no weights. A draft model that is no MTP layer is described where
    the options name one. Raises LoadError, ConfigError, or UnsupportedModel."""
    directory, dummy = config.model.directory, config.model.load_format == "dummy"
    if config.spec.drafter is not None and config.spec.checkpoint is not None:
        require_kind(config.spec.drafter, Path(config.spec.checkpoint))
    hf_config = read_config(directory)
    family, checkpoint = (
        family_of(hf_config),
        Checkpoint(directory, {}) if dummy else Checkpoint.open(directory),
    )
    layers = hf_config.get_int("num_hidden_layers", at_least=1)
    checkpoint, layout = (
        (checkpoint, dummy_layout(family, hf_config)) if dummy else with_mtp_layers(checkpoint, layers)
    )
    apart = config.spec.speculative_draft_model_path is not None
    if want_mtp and (family.mtp_rules is None or (family.mtp_apart and layout is None and not apart)):
        name = hf_config.raw("architectures")[0]
        raise NoMTPLayer(f"{directory}: the architecture {name} has no MTP layer")
    nextn, prefix = None, None
    if dummy and want_mtp and apart:
        raise ConfigError(
            "--speculative-draft-model-path must be left out with --load-format dummy: the draft "
            "layer is random, too"
        )
    if want_mtp and config.spec.speculative_draft_model_path is not None:
        nextn = Checkpoint.open(config.spec.speculative_draft_model_path)
        prefix = nextn_prefix(nextn.tensors, layers)
    elif want_mtp and layout is None:
        raise NoMTPLayer(f"{directory}: {why_no_mtp(hf_config, layers)}")
    count = mtp_count(config, family, layout if nextn is None else None) if want_mtp else 0
    arch = arch_of(family, hf_config, count, checkpoint, config.model.tokenizer_directory)
    arch, hot = with_ranks(config, arch), config.spec.speculative_token_map
    head = head_of(config, arch)
    if head is not None:
        arch = replace(arch, layers=arch.layers + head.arch.layers, draft=head.arch)
    if hot is not None and arch.own_draft_head:
        raise ConfigError(
            "--speculative-token-map needs a draft model that shares the target model's head, and "
            "this draft model has its own head"
        )
    token_map = (
        read_token_map(hot, arch.vocab) if arch.drafts and config.spec.steps and hot is not None else None
    )
    return Described(
        hf_config,
        family,
        arch,
        checkpoint,
        layout,
        nextn,
        prefix,
        head,
        token_map,
        dummy,
        spread_of(config, arch),
        LoRASizes(config.lora.max_loras, config.lora.max_lora_rank) if config.lora.is_enabled else None,
    )


def deep_as_layers(config: EngineConfig, arch: ModelArch) -> EngineConfig:
    """Limits the depth to the number of MTP layers, if each depth has one and the user chose no depth."""
    if (
        arch.mtp is None
        or not arch.mtp.each_depth
        or config.spec.depth_told
        or config.spec.steps <= arch.mtp.layers
    ):
        return config
    return replace(config, spec=replace(config.spec, speculative_num_steps=arch.mtp.layers))


@dataclass(frozen=True, slots=True)
class Plan:
    config: EngineConfig  # what was asked for, with what follows from the model
    described: Described  # the whole model, also where several ranks compute it
    dtype: torch.dtype
    device: torch.device
    storage: Storage
    memory: MemoryPlan  # one rank's memory
    drafting: str = ""  # what drafts, and why, for people
    left_out: bool = False  # there is an MTP layer, and it cannot be used


def plan(config: EngineConfig) -> Plan:
    """Plans an engine with the drafter that the options name; if they name none, drafter.py chooses. All
    ranks have the same plan. Raises LoadError and ConfigError."""
    described = describe(config, want_mtp=drafts_itself(config.spec))
    device = device_of(config)
    config = replace(config, scheduler=config.scheduler.on(device.type))
    config = deep_as_layers(paged(config, described.arch), described.arch)
    config = with_format(config, described.config)
    dtype = dtype_of(config, described.arch, device)
    length = config.model.context_length
    if length is not None and length > described.arch.max_positions:
        raise ConfigError(
            f"--context-length must be at most {described.arch.max_positions}, the model's maximum, "
            f"got {length}"
        )
    kernels = kernels_of(config, device)
    storage = storage_of(config, described.checkpoints, dtype, device, kernels == "triton")
    int8, draft_int8 = int8_of(config, described.arch, dtype, kernels)
    storage = replace(storage, int8=int8, draft_int8=draft_int8)
    ranks = config.parallel.ranks
    sizes = fixed(described, dtype, positions(config, described.arch, device), storage, ranks)
    state, tables = state_of(config, described.arch, device)
    arch = one_rank(described.arch, ranks)
    memory = plan_memory(
        config, arch, storage.cache, device, sizes, lookahead_of(config, device), state, tables
    )
    return Plan(config, described, dtype, device, storage, memory)


def overlap_of(config: EngineConfig, device: torch.device) -> int:
    """Steps in flight while another is planned. On a CPU the host computes, so there is nothing to overlap
    with."""
    return int(device.type == "cuda" and not config.scheduler.disable_overlap_schedule)


def context_of(config: EngineConfig, arch: ModelArch) -> int:
    return arch.max_positions if config.model.context_length is None else config.model.context_length


def lookahead_of(config: EngineConfig, device: torch.device) -> int:
    """Tokens of a request for which pages are held after those that the host knows."""
    return spec_sizes(config.spec, config.scheduler.step_tokens).num_lookahead_tokens(
        overlap_of(config, device)
    )


def positions(config: EngineConfig, arch: ModelArch, device: torch.device) -> int:
    """Positions that a step may compute: the rotary tables' length."""
    return context_of(config, arch) + lookahead_of(config, device)


def state_of(config: EngineConfig, arch: ModelArch, device: torch.device) -> tuple[Sizes, Sizes]:
    """The tensors that the runner makes, made on no device."""
    sizes, nowhere = spec_sizes(config.spec, config.scheduler.step_tokens), torch.device("meta")
    context, in_flight = context_of(config, arch), overlap_of(config, device)

    def parts(running: int) -> tuple[DeviceRequests, LogitRules]:
        req_tensors = DeviceRequests(
            running,
            context,
            sizes,
            arch.vocab,
            config.cache.page_size,
            nowhere,
            spare_pages=[0] * len(page_groups(arch.layers)),
            coupled=coupled(config.spec),
            in_flight=in_flight,
        )
        captured = device.type == "cuda" and not config.scheduler.disable_cuda_graph
        max_masks = sizes.rows_per_step if captured else None
        return req_tensors, LogitRules(req_tensors, running, arch.vocab, (), (), nowhere, max_masks)

    def state(running: int) -> int:
        req_tensors, rules = parts(running)
        return req_tensors.nbytes + SamplingState(running, rules, nowhere).nbytes

    return state, lambda running: parts(running)[1].table_bytes


def fixed(
    described: Described, dtype: torch.dtype, positions: int, storage: Storage, ranks: int = 1
) -> Fixed:
    """Returns the sizes of one rank's part of the model in memory, without making it. Embedding and head,
    which the MTP layer shares, count once."""
    model = empty_model(described, dtype, positions, storage, PlannedRank(0, ranks), described.spread)
    sizes = {name: tensor.nbytes for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    for name, module in model.named_modules():
        int8 = storage.draft_int8 if name.startswith(DRAFTS) else storage.int8 and name.startswith("layers.")
        if int8 and isinstance(module, Linear):
            sizes[f"{name}.weight"] = module.weight.numel()
    drafts = sum(size for name, size in sizes.items() if name.startswith(DRAFTS))
    # Heads of its own are counted with its layers.
    copied = storage.draft_int8 and described.token_map is None and not described.arch.own_draft_head
    tokens = described.arch.vocab if copied else len(described.token_map or ())
    reduced = share(tokens, ranks) * described.arch.hidden * (1 if storage.draft_int8 else dtype.itemsize)
    what = "MTP layer" if described.arch.draft is None else described.arch.draft.kind
    return Fixed(sum(sizes.values()) - drafts, drafts, reduced, dtype.itemsize, what)


def empty_model(
    described: Described,
    dtype: torch.dtype,
    positions: int,
    storage: Storage,
    ranks: Ranks = ALONE,
    spread: SpreadExperts | None = None,
) -> DecoderModel:
    """Builds the model on no device: names, shapes and dtypes."""
    kernels = KERNELS.get("torch")()
    with torch.device("meta"):
        model = build_model(
            described, dtype, positions, replace(kernels, ranks=ranks, spread=spread), storage
        )
        full_model = (
            model
            if ranks.size == 1 and spread is None
            else build_model(described, dtype, positions, kernels, storage)
        )
    if storage.kinds:
        wide = hold_blocks(
            model,
            placements(full_model, sources(described)),
            storage.kinds,
            shards_of(full_model, model, ranks),
        )
        if wide:
            why = "they take more memory: a rank's part of them would not be whole blocks or groups"
            log.warning(
                "--tensor-parallel-size %d: %d matrices become %s (%s, …), and %s",
                ranks.size,
                len(wide),
                dtype,
                wide[0],
                why,
            )
    return model


def build_model(
    described: Described, dtype: torch.dtype, positions: int, kernels: Kernels, storage: Storage
) -> DecoderModel:
    """The part of the rank that `kernels.ranks` names, with the experts that `kernels.spread` does. Its
    weights are uninitialised."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        adapted, current = with_adapters(kernels)
        methods, used = storage.methods(kernels), kernels if described.lora is None else adapted
        model = described.family.build(
            one_rank(described.arch, kernels.ranks.size), methods, dtype, positions, used
        )
        if described.lora is not None:
            attach(model, described.lora, current)
        if described.head is not None:
            model.draft = described.head.make(
                model, methods, dtype, positions, replace(kernels, ranks=ALONE, spread=None, routing=None)
            )
        return model
    finally:
        torch.set_default_dtype(before)


def sources(described: Described) -> list[WeightSource]:
    """The model's own checkpoint first."""
    arch, family = described.arch, described.family
    rules, also = family.trunk_rules(arch), []
    used = arch.mtp.layers if arch.mtp is not None and described.nextn is None else 0
    if used:
        assert family.mtp_rules is not None and described.layout is not None
        prefixes = described.layout.prefixes[:used]
        rules += [rule for prefix in prefixes for rule in family.mtp_rules(arch, prefix)]
    rules += without_mtp(described.config, described.layout, arch.num_layers, used)
    if described.nextn is not None and described.nextn_prefix is not None:
        separate = nextn_rules(family, arch, described.nextn_prefix)
        also = [WeightSource(described.nextn, separate)]
    if described.head is not None:
        also = [WeightSource(described.head.checkpoint, described.head.inside(DRAFT))]
    return [WeightSource(described.checkpoint, rules), *also]


NAME_PREFIXES = ("", "draft:")  # of the sources' tensors, in updates of weights


def open_as(described: Described, directory: Path) -> Checkpoint:
    """Reads the headers of another checkpoint of this model. Raises LoadError."""
    return with_mtp_layers(Checkpoint.open(directory), described.arch.num_layers)[0]


def load_model(
    described: Described,
    dtype: torch.dtype,
    device: torch.device,
    positions: int,
    kernels: Kernels,
    progress: bool,
    storage: Storage,
) -> DecoderModel:
    """The part of the rank that `kernels.ranks` names, with its experts."""
    kernels = replace(kernels, spread=described.spread)
    model = build_model(described, dtype, positions, kernels, storage)
    plain = replace(storage, keep_blocks=False, keep_int4=False)
    full_model = (
        model
        if kernels.ranks.size == 1 and kernels.spread is None
        else empty_model(described, dtype, positions, plain)
    )
    if described.dummy:
        log.warning("DUMMY WEIGHTS: --load-format dummy uses random weights; the output is meaningless")
        fill(model, device, full_model, kernels.ranks)
    else:
        source, *also = sources(described)
        load(
            model,
            source.checkpoint,
            source.rules,
            dtype=dtype,
            device=device,
            progress=progress,
            also=also,
            keep=storage.kinds,
            whole=full_model,
            ranks=kernels.ranks,
        )
    return model.eval()
