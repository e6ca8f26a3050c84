"""Verification, proposals and chains of them by the kernels for CPUs, each in one call. Verification reads
only the rows of nodes that decide something; a proposal reads its row once for the largest and, if it is
drawn, twice more."""

from __future__ import annotations

from dataclasses import dataclass

from mtpserve_kernels.cpu import chain
from mtpserve_kernels.cpu.accept import accept, argmax, draw, sampling_of
from torch import Tensor

from mtpserve.attention.cpu import CPUAttention
from mtpserve.core.batch import Batch, Hidden, Sampler, VerifyOutput
from mtpserve.core.heartbeat import PULSE
from mtpserve.core.protocols.models import DraftModel
from mtpserve.layers.decoder import MTPHead
from mtpserve.layers.devices.cpu_kernels import FusedStack, PanelMatrix, contexts_of
from mtpserve.layers.embedding import Embedding
from mtpserve.layers.linear import Linear
from mtpserve.spec.draft.chain import one_by_one
from mtpserve.spec.draft.passes import DraftPasses
from mtpserve.spec.verify.accept import kernel_inputs
from mtpserve.spec.verify.thresholds import Thresholds


def verify(logits: Tensor, batch: Batch, depth: int, thresholds: Thresholds) -> VerifyOutput:
    assert thresholds.lossless
    tokens, accepted, path, failed = accept(*kernel_inputs(logits, batch, batch.drafts, depth))
    return VerifyOutput(tokens, accepted, None if batch.tree is None else path, failed)


def propose(logits: Tensor, req_indices: Tensor, index: Tensor, sampler: Sampler, q: Tensor | None) -> Tensor:
    """See propose.propose."""
    if sampler.all_greedy:
        return argmax(logits)
    cuts = sampler.parameters
    return draw(
        logits, req_indices, index, cuts.temperature, cuts.top_k, cuts.top_p, cuts.min_p, cuts.seed,
        None if sampler.all_coupled else cuts.coupled, q,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class DescribedChain:
    """`chain`: None where the op does not have what the model is made of."""

    model: DraftModel
    chain: chain.Chain | None
    group: int = 0  # the group of the pages that its rows are stored in


def draft_chain(
    passes: DraftPasses, batch: Batch, hidden: Hidden, verify_output: VerifyOutput, steps: int
) -> tuple[Tensor, Tensor | None]:
    """spec.passes.DraftChain. Chains of other draft models, and those of requests with rules, are drafted one
    by one."""
    chain_info: DescribedChain | None = passes.described
    if chain_info is None or chain_info.model is not passes.model:
        chain_info = passes.described = described(passes)
    sampler, req_tensors, features = batch.sampler, batch.req_tensors, hidden.features
    if chain_info.chain is None or features is None or sampler.has_rules:
        return one_by_one(passes, batch, hidden, verify_output, steps)
    rows, last, req_indices = (
        passes.after(batch, features),
        passes.last(batch, verify_output),
        batch.drafted(batch.req_indices),
    )
    step_rows = chain.StepRows(
        rows.input_ids,
        rows.token_indices,
        rows.slot_mapping,
        rows.req_indices,
        rows.query_start_loc,
        rows.seq_lens,
    )
    cuts, sampling = sampler.parameters, None
    if not sampler.all_greedy:
        of_each = None if sampler.all_coupled else cuts.coupled
        sampling = sampling_of(cuts.temperature, cuts.top_k, cuts.top_p, cuts.min_p, cuts.seed, of_each)
    PULSE.beat()
    where = (
        last,
        passes.splits(rows, last),
        req_indices,
        req_tensors.num_tokens,
        req_tensors.block_tables[chain_info.group],
    )
    is_sampled = not sampler.all_greedy and not sampler.all_coupled
    return chain.drafts(chain_info.chain, steps, step_rows, features, *where, sampling, is_sampled)


def described(passes: DraftPasses) -> DescribedChain:
    model, attention = passes.model, passes.attention
    none = DescribedChain(model, None)
    if (
        not isinstance(model, MTPHead)
        or not isinstance(attention, CPUAttention)
        or passes.reduced is not None
    ):
        return none
    layer, product, trunk = model.run_layer, model.product, model.borrowed[0]
    if (
        not isinstance(layer, FusedStack)
        or layer.stack.ranks is not None
        or not isinstance(layer.embed, Embedding)
    ):
        return none
    table, rope = layer.embed.table, trunk.rope
    if table is None or not isinstance(product, Linear) or not isinstance(product.packed, PanelMatrix):
        return none
    cpu_chain = chain.chain_of(
        layer.stack.described, contexts_of(attention.stores), layer.described, table, layer.stack.last,
        product.packed.matrix, rope.cos,
        rope.sin, rope.interleaved, attention.layouts[0], model.arch.recycle == "post",
    )  # fmt: skip
    assert cpu_chain.vocab == trunk.arch.vocab
    return DescribedChain(model, cpu_chain, attention.stores.stores[0].group)
