"""The dimensions of one rank's part of a model: Megatron's split of each layer
(https://arxiv.org/abs/1909.08053 §3).

Heads and intermediate sizes are divided by the number of ranks, or the routed experts by their numbers
(`MoEArch.by_rank`). A key head is kept by several ranks where there are fewer of them than ranks, each with
its own query heads of that group. The latent row of MLA, index keys, routers, norms and projections between
hidden states are whole on every rank. The vocabulary is whole here, too: its rows are divided by
layers/embedding.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mtpserve.core.arch.model import Attention, KVReader, LayerKind, ModelArch, Recurrent
from mtpserve.core.errors import ConfigError

MOST = 64  # ranks that an error message tries


def one_rank(arch: ModelArch, size: int) -> ModelArch:
    """`arch` as one of `size` ranks computes it. Raises ConfigError where the ranks would not have equal
    parts."""
    if size == 1:
        return arch
    for name, value in uneven(arch, size):
        fit = ", ".join(str(other) for other in range(1, MOST + 1) if not any(uneven(arch, other)))
        raise ConfigError(
            f"--tensor-parallel-size {size} does not fit this model's {value} {name}; sizes that do: {fit}"
        )
    moe, shared_kv = arch.moe, arch.shared_kv
    return replace(
        arch,
        layers=tuple(
            kind_of(kind, size) if is_shared(arch, i) else kind for i, kind in enumerate(arch.layers)
        ),
        heads=arch.heads // size,
        intermediate=arch.intermediate // size if any_dense(arch) else arch.intermediate,
        moe=None
        if moe is None
        else replace(moe, size=moe.size if moe.by_rank else moe.size // size, shared=moe.shared // size),
        shared_kv=None if shared_kv is None else replace(shared_kv, groups=shared_kv.groups // size),
    )


def is_shared(arch: ModelArch, layer: int) -> bool:
    """True if each rank stores a part of the layer's keys and values, or reads a part of another's."""
    return layer < arch.shared_layers or isinstance(arch.layers[layer], KVReader)


def kind_of(kind: LayerKind, size: int) -> LayerKind:
    match kind:
        case Attention():
            kv = kind.kv if kind.kv.kind == "mla" else replace(kind.kv, heads=max(kind.kv.heads // size, 1))
            return replace(kind, kv=kv, heads=None if kind.heads is None else kind.heads // size)
        case KVReader():
            part = kind_of(kind.kind, size)
            assert isinstance(part, Attention)
            return replace(kind, kind=part)
        case Recurrent():
            return replace(kind, key_heads=kind.key_heads // size, value_heads=kind.value_heads // size)
    return kind


def any_dense(arch: ModelArch) -> bool:
    """A layer has a feed-forward block without experts."""
    return arch.moe is None or any(layer < len(arch.layers) for layer in arch.moe.dense)


def uneven(arch: ModelArch, size: int) -> Iterator[tuple[str, int]]:
    """Dimensions that so many ranks cannot share, and their values."""
    dimensions = [("attention heads", arch.heads)]
    for kind in dict.fromkeys(kind for i, kind in enumerate(arch.layers) if is_shared(arch, i)):
        kind = kind.kind if isinstance(kind, KVReader) else kind
        if isinstance(kind, Attention):
            dimensions.append(("attention heads", arch.heads_of(kind)))
            if kind.kv.kind == "gqa" and size % kind.kv.heads:
                dimensions.append(("key heads", kind.kv.heads))
        elif isinstance(kind, Recurrent):
            dimensions += [
                ("key heads of recurrent layers", kind.key_heads),
                ("value heads of recurrent layers", kind.value_heads),
            ]
    if arch.shared_kv is not None:
        dimensions.append(("groups of the output projection", arch.shared_kv.groups))
    widths = [("numbers of the intermediate size", arch.intermediate)] if any_dense(arch) else []
    if arch.moe is not None:
        if arch.moe.by_rank:
            dimensions.append(("routed experts", arch.moe.experts))
        else:
            widths.append(("numbers of an expert's intermediate size", arch.moe.size))
        widths.append(("numbers of the shared expert's", arch.moe.shared))
    yield from ((name, value) for name, value in dimensions if value % size)
    # The CPU's products read numbers in pairs.
    yield from ((name, value) for name, value in widths if size > 1 and value % (2 * size))
