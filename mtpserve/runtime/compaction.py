"""After the verification of trees: what survived moves together, so that what follows sees chains."""

from __future__ import annotations

import torch

from mtpserve.attention.contexts import slots_of
from mtpserve.cache.states import States
from mtpserve.cache.stores import Stores
from mtpserve.core.batch import Batch, Hidden, VerifyOutput
from mtpserve.runtime.device_requests import DeviceRequests
from mtpserve.runtime.inputs import RowLayout, build_chains, without_stores

# Fields of a batch that follow from where its rows are.
PLACED = (
    "input_ids",
    "positions",
    "token_indices",
    "slot_mapping",
    "token_req_indices",
    "query_start_loc",
    "seq_lens",
    "last_token_rows",
    "sample_rows",
)


def compact(
    layout: RowLayout,
    batch: Batch,
    hidden: Hidden,
    verify_output: VerifyOutput,
    req_tensors: DeviceRequests,
    stores: Stores,
    states: States | None,
) -> tuple[Batch, Hidden]:
    """Move what survived of every tree together, so that what follows sees chains: the trunk's KV, what waits
    for its states, and hidden states.

        rows      x 1 2 3 4 5 6      path 0 2 5      →      x 2 5       their KV is now in the slots after x

    Called after the requests were advanced, with the chains' layout. A path shorter than the deepest repeats
    its last node: garbage after what counts.
    """
    assert verify_output.path is not None
    depth = verify_output.path.shape[1] - 1
    start = batch.token_indices[batch.query_start_loc[:-1]]
    chains = build_chains(layout, req_tensors, batch.req_indices, batch.sampler, start)
    # Verification has used up the drafts. What the batch says of the next ones stays.
    chained = batch._replace(
        **{name: getattr(chains, name) for name in PLACED},
        num_draft_tokens=layout.num_draft_tokens,
        tree=None,
        tree_bits=None,
        tree_start=None,
        checkpoint_tokens=None,
        checkpoint_states=None,
    )
    chained = without_stores(chained, batch.unstored)
    node = verify_output.path[layout.row_span, layout.node]
    old = batch.last_token_rows[layout.row_span] + torch.where(
        layout.node > 0, node, layout.offset - layout.num_tokens[layout.row_span] + 1
    )
    # Node j was stored j slots after the root, and so will be the path's j-th.
    deep = torch.arange(1, depth + 1, device=req_tensors.device)
    moved = deep <= verify_output.num_accepted_tokens.unsqueeze(1)
    root = batch.last_token_rows.unsqueeze(1)
    source, target = (
        torch.where(moved, root + verify_output.path[:, 1:], root),
        torch.where(moved, root + deep, root),
    )
    for group in stores.groups:
        slots = slots_of(batch, group)
        stores.move(group, slots[source], slots[target])
    stores.move_entries(
        batch.req_indices,
        verify_output.path[:, 1:],
        batch.token_indices[target],
        batch.slot_mapping[target],
        moved,
    )
    if states is not None:
        states.move(batch.req_indices, verify_output.path[:, 1:])
    return chained, hidden.at(old)
