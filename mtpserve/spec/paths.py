"""The drafts on the path to each node: the earlier tokens to which that node's rules apply."""

from __future__ import annotations

import torch
from torch import Tensor

from mtpserve.core.batch import Tree


def node_paths(drafts: Tensor, tree: Tree | None) -> tuple[Tensor, Tensor]:
    """drafts [R, K] → the drafts on the path to each node, itself included [R, K+1, K], and their number [R, K+1]."""
    spans, number = drafts.shape
    nodes = torch.arange(number + 1, device=drafts.device)
    if tree is None:
        return drafts.unsqueeze(1).expand(spans, number + 1, number), nodes.expand(spans, -1)
    member = (tree.ancestors.unsqueeze(2) >> nodes[1:] & 1).bool()  # [R, K+1, K]
    place = torch.where(member, member.long().cumsum(2) - 1, number)  # the others go to a column that is cut off
    path = drafts.new_zeros(spans, number + 1, number + 1).scatter(2, place, drafts.unsqueeze(1).expand_as(place))
    return path[..., :number], tree.depths
