"""The time of a step on a device that is not here: a roofline of three terms, to compare pools and policies,
not to predict a machine.

    seconds = overhead + max(weights / bandwidth, 2 · parameters · rows / flops)
                       + max(KV read / bandwidth, attention's products / flops)

Weights are read once per step and the KV of a request once for all of its rows, as kernels do that pack them.
In a mixture of experts all experts are read, which is right from some hundred rows on and too much for a few;
only the chosen ones compute. Products are in 16 bits whatever the weights are stored in. What proposes tokens
for the next step reads one layer and the head in each of its passes, and of rows of the model itself it
computes keys and values alone (spec/draft/passes.py), from their embedding and the model's output. Nothing is
lost to imbalance, padding or the host beyond `overhead`, so times are short: published decoding speeds of
well-tuned engines are 65 to 80 % of such bounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mtpserve.core.arch.model import Attention, ModelArch, attention_kinds, recurrent_kinds

DISK = 3e9  # bytes per second of files on an NVMe drive: what one writes for long, and less than it reads
# kernels of one layer that wait for each other: 6 where all that can be fused is, 12 in common engines
KERNELS = 10


class DeviceProfile(NamedTuple):
    bandwidth: float  # bytes per second, sustained
    flops: float  # per second, sustained, dense products of 16-bit numbers
    gap: float  # seconds lost per dependent kernel
    host: float  # bytes per second to and from pinned host memory


# h100: its memory as measured, products and gap as the h200's, which has the same processors.
# h200: a copy and a product of large matrices, as measured; the gap from published steps of graph-captured
# engines. b200: the data sheet (8.0 TB/s, 2.25 PFLOP/s), of which the H200 reaches 0.9 and 0.8 of its own.
# mi300x: measured shares of its data sheet, 81 % of 5.3 TB/s and 45 % of 1.31 PFLOP/s. cpu: two cores of a
# Zen 5, measured. host: PCIe 5.0 x16, 64 GB/s, of which copies reach 0.8; on a CPU a copy.
PROFILES = {
    "h100": DeviceProfile(3.0e12, 7.9e14, 2.2e-6, 5e10),
    "h200": DeviceProfile(4.3e12, 7.9e14, 2.2e-6, 5e10),
    "b200": DeviceProfile(7.2e12, 1.8e15, 2.2e-6, 5e10),
    "mi300x": DeviceProfile(4.3e12, 5.9e14, 2.5e-6, 5e10),
    "cpu": DeviceProfile(45e9, 8e11, 6e-6, 1e10),
}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What of a model the formula needs. The default is a dense one of 8 billion parameters: 32 layers of
    4096, 8 KV heads of 128."""

    # each with a feed-forward block; where blocks are layers of their own, that and what is before it count
    # as one
    layers: int = 32
    # that a row is multiplied with; the embedding is not, the tokens that a row selects are
    parameters: int = 7_500_000_000
    weight_bytes: int = 15_000_000_000  # read in a step
    kv_bytes: int = 131_072  # bytes of one token, in all layers
    # operations of one row with one token of its context, in all layers; to score it where tokens are
    # selected
    pair_flops: int = 524_288
    pass_bytes: int = 1_486_000_000  # read by one pass that proposes tokens: one layer and the head
    kept_parameters: int = 42_000_000  # parameters of that layer that make its keys and values
    kept_bytes: int = 84_000_000
    context: int = 131_072

    @staticmethod
    def of(arch: ModelArch, weight_size: float, kv_size: float) -> ModelShape:
        """`weight_size`, `kv_size`: bytes of one number."""
        size, head = arch.hidden, arch.vocab * arch.hidden
        blocks, moe = arch.feed_forwards, arch.moe
        dense, layers = (2 if arch.gate == "relu2" else 3) * size * arch.intermediate, len(blocks)
        kinds, recurrent = attention_kinds(arch.layers[: arch.num_layers]), recurrent_kinds(arch.layers)
        active = total = (
            head
            + sum(_attention(arch, kind) for kind in kinds)
            + sum(size * (kind.channels + 2 * kind.value_heads * kind.value_dim) for kind in recurrent)
        )
        active += sum(kind.selected.best * _wide(arch, kind) for kind in kinds if kind.selected is not None)
        if moe is None:
            active, total = active + layers * dense, total + layers * dense
        else:
            matrices, without = 2 if moe.gate == "relu2" else 3, sum(layer in blocks for layer in moe.dense)
            routed, expert = layers - without, matrices * (moe.latent or size) * moe.size
            always = without * dense + routed * size * (moe.experts + matrices * moe.shared + 2 * moe.latent)
            active, total = (
                active + always + routed * moe.top_k * expert,
                total + always + routed * moe.experts * expert,
            )
        return ModelShape(
            layers,
            active,
            int(total * weight_size),
            int(sum(kind.numbers for kind in attention_kinds(arch.layers)) * kv_size),
            sum(2 * (_wide(arch, kind) if kind.selected is None else _scored(arch, kind)) for kind in kinds),
            int((head + (total - head) // layers) * weight_size),
            kv_parameters := 2 * size * size + _kv_projections(arch, kinds[-1]),
            int(kv_parameters * weight_size),
            arch.max_positions,
        )


def _wide(arch: ModelArch, kind: Attention) -> int:
    """Numbers of keys and values that a row is multiplied with, of each token that it attends to, by all
    heads."""
    return arch.heads_of(kind) * (kind.kv.key_dim + kind.kv.value_dim)


def _scored(arch: ModelArch, kind: Attention) -> int:
    """The same of each token that it may attend to, where it selects."""
    return 0 if arch.indexer is None else arch.indexer.heads * kind.index_dim


def _kv_projections(arch: ModelArch, kind: Attention) -> int:
    """Parameters of one layer's projections to what its cache holds."""
    if arch.mla is not None:
        return arch.hidden * (arch.mla.kv_rank + arch.mla.rope)
    return arch.hidden * kind.kv.heads * (kind.kv.key_dim + kind.kv.value_dim)


def _attention(arch: ModelArch, kind: Attention) -> int:
    """Parameters of one layer's projections."""
    kv_heads, key, value = kind.kv.heads, kind.kv.key_dim, kind.kv.value_dim
    if (mla := arch.mla) is None:
        heads = arch.heads_of(kind)
        return arch.hidden * (heads * key + kv_heads * (key + value) + heads * value)
    indexer = (
        0
        if arch.indexer is None or not kind.index_dim
        else arch.hidden * (kind.index_dim + arch.indexer.heads)
    )
    indexer += _scored(arch, kind) * (mla.q_rank or 0)
    wide = arch.heads * (mla.nope + mla.rope)
    query = arch.hidden * wide if mla.q_rank is None else mla.q_rank * (arch.hidden + wide)
    latent = arch.hidden * (mla.kv_rank + mla.rope) + mla.kv_rank * arch.heads * (mla.nope + mla.value)
    return query + latent + indexer + arch.heads * mla.value * arch.hidden


@dataclass(frozen=True, slots=True)
class StepCost:
    """The costs of a step, in seconds. The defaults suit tests: every step takes as long, whatever is in
    it."""

    overhead: float = 0.01
    weights: float = 0.0  # to read them
    row: float = 0.0  # to multiply one with all weights
    token: float = 0.0  # to read one token's KV
    pair: float = 0.0  # attention of one row to one token
    draft_pass: float = 0.0  # one over what proposes tokens, with its head
    extend: float = 0.0  # to make its keys and values for rows that the model itself has computed
    absorbed_row: float = 0.0  # to compute one of these rows

    @staticmethod
    def of(
        shape: ModelShape, device: DeviceProfile, drafts: bool = False, overhead: float | None = None
    ) -> StepCost:
        """`drafts`: there is a layer that proposes tokens, and takes all rows, at once or some steps later.
        `overhead` replaces what the device's profile says."""
        kernels = KERNELS * device.gap if overhead is None else 0.0  # kernels of one layer
        return StepCost(
            kernels * shape.layers if overhead is None else overhead,
            shape.weight_bytes / device.bandwidth,
            2 * shape.parameters / device.flops,
            shape.kv_bytes / device.bandwidth,
            shape.pair_flops / device.flops,
            kernels + shape.pass_bytes / device.bandwidth,
            drafts * (kernels + shape.kept_bytes / device.bandwidth),
            drafts * 2 * shape.kept_parameters / device.flops,
        )

    def seconds(
        self, rows: int, tokens: int, pairs: int, passes: int = 0, absorbed: Sequence[int] = ()
    ) -> float:
        """Returns the seconds of a step with so many rows whose requests have so many tokens. `pairs`: the
        sum over all rows of what each attends to; `passes`: over what proposes tokens; `absorbed`: rows of
        each pass over it that proposes none."""
        computed = max(self.weights, self.row * rows) + max(self.token * tokens, self.pair * pairs)
        absorbing = sum(max(self.extend, self.absorbed_row * number) for number in absorbed)
        return self.overhead + computed + passes * self.draft_pass + absorbing
