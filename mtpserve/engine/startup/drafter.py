"""The drafter of an engine if the options name none. Multi-token prediction is the normal way to decode:

    --speculative-draft-model-path     what the files there are (heads/kinds.py)
    the checkpoint's own MTP layer     where it has one that can be used
    nothing                            plain decoding

An MTP layer that cannot be used is warned of, and an error where it was asked for: by its name, or by an
option that only drafts have. So is one for which there is no memory where several processes have to decide
alike.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from mtpserve.cache.groups import PageGroups
from mtpserve.config import EngineConfig, SpecConfig
from mtpserve.config.spec import NONE
from mtpserve.core.arch.model import Attention, KVReader, LayerKind, page_groups
from mtpserve.core.errors import ConfigError, LoadError, NoRoom, PoolTooSmall
from mtpserve.core.protocols.attention import AttentionBackend
from mtpserve.core.request import ModelCard
from mtpserve.core.spec_sizes import SpecSizes
from mtpserve.engine.startup.planning import (
    Described,
    NoMTPLayer,
    Plan,
    empty_model,
    lookahead_of,
    plan,
    sources,
)
from mtpserve.engine.startup.storage import Storage
from mtpserve.heads.kinds import HEADS, algorithm_of
from mtpserve.runtime.memory import require_memory
from mtpserve.spec.sizes import spec_sizes
from mtpserve.weights.plan import WeightSource, plan as placements

OWN = "MTP"
WHOLE = "a model of its own"
ENOUGH_PAGES = 1 << 16  # for any request's drafts


def plan_engine(config: EngineConfig, must_fit: bool = True) -> Plan:
    """The plan, whose config names the drafter. `must_fit`: into this machine's memory, or there is no MTP
    layer either. Raises LoadError and ConfigError."""
    spec = config.spec
    if spec.named:
        return with_reason(plan(config), "set by --speculative-algorithm")
    if spec.checkpoint is not None:
        return with_draft_model(config, spec.checkpoint)
    try:
        engine_plan = plan(drafting_with(config, OWN))
        if not spec.drafter_options:
            require_usable(engine_plan, must_fit)
    except NoMTPLayer as error:
        if spec.drafter_options:
            name = spec.drafter_options[0]
            raise ConfigError(
                f"--{name.replace('_', '-')} {getattr(spec, name)} needs a source of drafts, and "
                f"{error.reason}; --speculative-algorithm NGRAM needs no model"
            ) from error
        return with_reason(plan(drafting_with(config, NONE)), error.reason)
    except (LoadError, ConfigError) as error:
        if spec.drafter_options:
            raise
        if isinstance(error, PoolTooSmall) and config.cache.max_total_tokens is not None:
            raise PoolTooSmall(
                f"{error}; with --speculative-algorithm none no tokens are reserved for drafts"
            ) from error
        if isinstance(error, NoRoom) and together(config):
            raise NoRoom(f"{error}; --speculative-algorithm none does not load the MTP layer") from error
        return without(config, error, must_fit)
    return with_reason(
        engine_plan,
        "the checkpoint's MTP layer (default; see --speculative-algorithm)",
    )


def with_draft_model(config: EngineConfig, directory: str) -> Plan:
    algorithm = algorithm_of(Path(directory))
    if algorithm is None:
        raise ConfigError(
            f"--speculative-draft-model-path {directory}: the kind of draft model cannot be "
            "recognized from its config and tensors: name it with --speculative-algorithm"
        )
    return with_reason(
        plan(drafting_with(config, algorithm)), f"{directory} is {HEADS.get(algorithm, WHOLE)}"
    )


def without(config: EngineConfig, error: LoadError | ConfigError, must_fit: bool) -> Plan:
    """Plain decoding, if that can be. `error`: of the MTP layer."""
    engine_plan = plan(drafting_with(config, NONE))
    if must_fit:
        require_memory(engine_plan.memory, engine_plan.config, engine_plan.device)
    return replace(
        with_reason(engine_plan, f"the checkpoint's MTP layer cannot be used: {error}"), left_out=True
    )


def with_reason(engine_plan: Plan, why: str) -> Plan:
    """The plan with a line that names the drafter and the reason for it."""
    spec = engine_plan.config.spec
    what = (
        f"{'+'.join(spec.parts)}, up to {spec.steps} drafts in a row"
        if spec.parts
        else "none, plain decoding"
    )
    mtp, layout = engine_plan.described.arch.mtp, engine_plan.described.layout
    if mtp is not None and layout is not None and layout.count > 1 and not mtp.each_depth:
        why += f"; the first of its {layout.count} MTP layers drafts at every depth"
    return replace(engine_plan, drafting=f"{what}: {why}")


def drafting_with(config: EngineConfig, algorithm: str) -> EngineConfig:
    return replace(config, spec=config.spec.drafting_with(algorithm))


def as_chosen(spec: SpecConfig, card: ModelCard) -> SpecConfig:
    """What the options mean for an engine that runs."""
    result = spec if spec.named else spec.drafting_with(card.algorithm or NONE)
    return (
        result
        if result.depth_told or not card.speculative_steps
        else replace(result, speculative_num_steps=card.speculative_steps)
    )


def together(config: EngineConfig) -> bool:
    """Several processes compute together or exchange pages, and each looks at its own memory."""
    return config.parallel.ranks > 1 or config.parallel.spreads or config.disaggregation.role is not None


def require_usable(engine_plan: Plan, must_fit: bool) -> None:
    """Checks now what a named drafter shows only in loading and in assembling. Raises LoadError and
    ConfigError."""
    config, arch = engine_plan.config, engine_plan.described.arch
    budget, reserve = config.scheduler.step_tokens, lookahead_of(config, engine_plan.device)
    sizes = spec_sizes(config.spec, budget)
    pages = PageGroups(
        page_groups(arch.layers),
        # A list of the pages of a pool that fits nowhere would not fit either.
        [min(count, ENOUGH_PAGES) for count in engine_plan.memory.pages],
        config.cache.page_size,
        budget,
        engine_plan.memory.states or None,
    )
    sizes.require(budget, pages.capacity(reserve), reserve)
    check_windows(arch.layers, sizes)
    require_weights(engine_plan.described)
    if must_fit:
        require_memory(engine_plan.memory, config, engine_plan.device)


def require_weights(described: Described) -> None:
    """Checks that all of the MTP layer's tensors are in the checkpoint, in shapes and formats that it can
    have. The trunk's are checked when they are loaded. Raises LoadError."""
    if described.dummy or described.layout is None:
        return
    layer = nn.Module()
    layer.add_module(
        "mtp_head", empty_model(described, torch.bfloat16, 1, Storage(False, torch.bfloat16)).mtp_head
    )
    mtp_tensors = {
        name: entry
        for name, entry in described.checkpoint.tensors.items()
        if name.startswith(described.layout.prefixes)
    }
    placements(
        layer, [WeightSource(replace(described.checkpoint, tensors=mtp_tensors), sources(described)[0].rules)]
    )


def check_layers(
    layers: Seq[LayerKind], attention: AttentionBackend, backend: str, drafts: SpecSizes
) -> None:
    """Raises ConfigError for a kind of layer that cannot be computed."""
    for kind in dict.fromkeys(layers):
        if not isinstance(kind, KVReader) and not attention.supports(kind):
            raise ConfigError(
                f"--attention-backend {backend} does not support layers of {kind}; reference does"
            )
    check_windows(layers, drafts)


def check_windows(layers: Seq[LayerKind], drafts: SpecSizes) -> None:
    """Raises ConfigError for a window that is smaller than drafts are deep."""
    for kind in dict.fromkeys(layers):
        # Backends count how far back a node of a tree is by places: as long as all of its path is seen, these
        # are the positions.
        window = kind.window if isinstance(kind, Attention) else None
        if window is not None and drafts.branching and window <= drafts.depth:
            raise ConfigError(
                f"drafts {drafts.depth} deep need layers with a window of at least "
                f"{drafts.depth + 1}, got {kind}"
            )
