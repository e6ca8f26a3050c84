"""Requests with grammars in captured steps, around the step: before it their proposals and masks go up in one
copy each, after it what waits for them comes down.

    step n       … proposals wait ─ table ↓            the host reads the step, takes the grammars along,
    step n + 1   proposals ↑ ─ masks ↑ ─ replay …      and decides which proposals stay (proposals.py)

Their next step is planned when this one was read (RequestState.is_synchronous), so the host knows their text.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch

from mtpserve.core.spec_sizes import SpecSizes
from mtpserve.runtime.device_requests import DeviceRequests
from mtpserve.runtime.runner_request import RunnerRequest
from mtpserve.runtime.sampling.proposals import Node, ProposalLimits, Proposals
from mtpserve.runtime.sampling.rules import LogitRules
from mtpserve.runtime.transfer import Download, pinned

log = logging.getLogger(__name__)

NOTHING_WAITS = ProposalLimits(0, 0, 0, 0, False)


def follow(request: RunnerRequest) -> None:
    """Take a request's grammar along its text; the request ends where the grammar forbids it."""
    try:
        request.advance_grammar()
    except ValueError as error:
        log.exception("a grammar forbids the text of %s", request.id, extra={"request_id": request.id})
        request.refuse(error)


def constrained(requests: Seq[RunnerRequest]) -> list[RunnerRequest]:
    return [request for request in requests if request.grammar is not None and request.is_constrained]


class Constraints:
    def __init__(self, req_tensors: DeviceRequests, rules: LogitRules) -> None:
        self.req_tensors, self.rules = req_tensors, rules

    def prepare(self, request: RunnerRequest) -> None:
        """Before a step that samples for the request: where nothing waits, the first mask is known."""
        if request.proposals is not None or request.num_waiting > 0 or request.error is not None:
            return
        if request.grammar is not None and request.is_constrained:
            request.proposals = Proposals(request.grammar, self.rules.vocab, NOTHING_WAITS)

    def upload(self, requests: Seq[RunnerRequest], trees: bool) -> list[int]:
        """Returns the first of each request's masks among the rows of `LogitRules.mask_table`; 0: it has
        none."""
        table = self.rules.mask_table()
        firsts, first, parts, seats, nodes = [], len(table.nodes), [], [], []
        end = first
        for request in requests:
            proposals = request.proposals if request.is_constrained else None
            firsts.append(0 if proposals is None else end)
            if proposals is not None:
                end += len(proposals.words)
                parts.append(proposals.words)
                seats.append(request.req_idx)
                nodes.append(proposals.nodes)
        if parts:
            forbidden = pinned(torch.from_numpy(~np.concatenate(parts)), self.rules.device)
            table.words[first:end].copy_(forbidden, non_blocking=True)
            self.req_tensors.replace_waiting(seats, nodes, trees)
        return firsts

    def download(self, requests: Seq[RunnerRequest], sizes: SpecSizes) -> WaitingProposals | None:
        """What now waits for those of `requests` whose grammars bear on it, where their next step may be
        captured."""
        asking = [request for request in constrained(requests) if not self.rules.needs_host(request)]
        if not asking:
            return None
        nodes = sizes.nodes if sizes.trees else sizes.depth
        limits = ProposalLimits(nodes, sizes.depth, sizes.free, sizes.steps, sizes.trees)
        table = self.req_tensors.waiting([request.req_idx for request in asking])
        return WaitingProposals(asking, Download(table), limits, self.rules.vocab)


@dataclass(frozen=True, slots=True)
class WaitingProposals:
    """On their way to the host, after a step."""

    requests: Seq[RunnerRequest]
    table: Download  # DeviceRequests.waiting
    limits: ProposalLimits
    vocab: int

    def read(self, request: RunnerRequest, row: Seq[int]) -> int:
        """Called when the request has got the step's tokens → how many proposals its next step verifies."""
        follow(request)
        if request.error is not None or request.grammar is None:
            return 0
        number, *numbers = row
        tokens, parents, sources = np.reshape(numbers, (3, -1)).tolist()
        waiting = list(map(Node, tokens, parents, sources))[:number]
        limits = self.limits if request.max_depth is None else self.limits.limited(request.max_depth)
        request.proposals = Proposals(request.grammar, self.vocab, limits, waiting)
        request.num_waiting = len(request.proposals.nodes)
        request.num_first_proposals += number > 0
        request.num_lost_proposals += request.proposals.loses_first
        return request.num_waiting

    def rows(self) -> dict[int, list[int]]:
        """By the requests' seats."""
        seats = [request.req_idx for request in self.requests]
        return dict(zip(seats, self.table.wait().tolist(), strict=True))
