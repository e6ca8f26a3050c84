"""Which experts each token of a request had (--enable-return-routed-experts), kept beside keys and values:
what the trunk notes in a step goes to the rows' slots, and what a request wants is read from its pages.

So everything that holds for pages holds for it: rows that come to nothing are overwritten, the path of a tree
moves together, and a prefix that another request computed is there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate, chain
from math import prod

import torch
from msgspec.structs import replace
from torch import Tensor

from mtpserve.cache.pool import KVPool
from mtpserve.config import SamplingConfig
from mtpserve.core.arch.model import ModelArch, page_groups
from mtpserve.core.errors import ConfigError
from mtpserve.core.plan import SpanPlan, SpanResult
from mtpserve.runtime.device_requests import DeviceRequests
from mtpserve.runtime.publish import Span
from mtpserve.runtime.runner_request import RunnerRequest
from mtpserve.runtime.transfer import Download, staged


class RoutingRecord:
    """layers.kernels.NoteExperts: the choices of one pass of the trunk, and none of layers after its own."""

    def __init__(self, arch: ModelArch) -> None:
        assert arch.moe is not None
        self.layers, self.top_k = arch.num_layers, arch.moe.top_k
        self.dtype = torch.uint8 if arch.moe.experts + arch.moe.zero_experts <= 256 else torch.int16
        self._choices: defaultdict[int, list[Tensor]] = defaultdict(list)

    @property
    def shape(self) -> tuple[int, int, torch.dtype]:
        """Layers, experts of a token in each, and the type of their numbers."""
        return self.layers, self.top_k, self.dtype

    @property
    def sizes(self) -> tuple[int, int, int]:
        """core.request.ModelCard.experts"""
        return self.layers, self.top_k, self.dtype.itemsize

    def __call__(self, layer: int, topk_ids: Tensor) -> None:
        """topk_ids [T, top_k]. A trunk that computes its rows in parts adds one after the other."""
        if layer < self.layers:
            self._choices[layer].append(topk_ids)

    def take(self, rows: int) -> Tensor:
        """[rows, layers, top_k] of the pass that has ended; 0 in layers without experts."""
        choices, self._choices = self._choices, defaultdict(list)
        parts = [
            torch.cat(choices[layer])[:rows].to(self.dtype) if layer in choices else None
            for layer in range(self.layers)
        ]
        empty = torch.zeros_like(next(part for part in parts if part is not None))
        return torch.stack([empty if part is None else part for part in parts], 1)


def routing_record(config: SamplingConfig, arch: ModelArch) -> RoutingRecord | None:
    """None: nobody wants to know. Raises ConfigError for models that cannot have one."""
    if not config.enable_return_routed_experts:
        return None
    if arch.moe is None:
        raise ConfigError(
            f"--enable-return-routed-experts needs a model with experts, got the family {arch.family}"
        )
    if page_groups(arch.layers)[0] is not None:
        raise ConfigError(
            f"--enable-return-routed-experts needs a layer that attends to all tokens, and {arch.family} "
            "has none here: pages of windows are gone when a prefix is found"
        )
    return RoutingRecord(arch)


def token_bytes(config: SamplingConfig, arch: ModelArch) -> int:
    """What a token's experts take in its page."""
    record = routing_record(config, arch)
    return 0 if record is None else prod(record.sizes)


@dataclass(frozen=True, slots=True)
class RoutedRows:
    """The experts of some spans' tokens on their way to the host."""

    spans: Seq[Span]
    widths: Seq[int]  # rows of each span, of which its last ones count
    rows: Download  # [sum of widths, layers * top_k]

    def added(self, results: Mapping[int, SpanResult]) -> dict[int, SpanResult]:
        """The results by places in the plan, with the experts of the tokens that each span has computed."""
        host, filled = self.rows.wait().numpy(), dict(results)
        ends = accumulate(self.widths)
        for (index, plan, request), end in zip(self.spans, ends, strict=True):
            if (result := results[index]).error is None:
                count = found_before(plan, request) + plan.num_tokens + result.num_accepted_tokens
                tokens = [row.tobytes() for row in host[end - count : end]]
                filled[index] = replace(result, routed_experts=tokens)
        return filled


class ExpertPages:
    """`pool` [layers, slots, 1, top_k] is in the pages of group 0."""

    def __init__(self, record: RoutingRecord, pool: KVPool, req_tensors: DeviceRequests) -> None:
        self.record, self.pool, self.req_tensors = record, pool, req_tensors

    def store(self, slots: Tensor) -> None:
        """After a pass of the trunk over the rows of these slots [T]."""
        self.pool.k.index_copy_(1, slots, self.record.take(len(slots)).transpose(0, 1).unsqueeze(2))

    def rows(self, spans: Seq[Span]) -> RoutedRows | None:
        """Reads what these spans' step has computed, after it was launched. The device knows how many
        rows it has accepted: as many are read as there may be. None: no request wants them."""
        spans = [span for span in spans if span[2].sampling.return_routed_experts]
        if not spans:
            return None
        widths = [found_before(plan, request) + plan.num_rows for _, plan, request in spans]
        places = [range(-width, 0) for width in widths]
        req_indices = chain.from_iterable(
            [plan.req_idx] * width for (_, plan, _), width in zip(spans, widths, strict=True)
        )
        device = self.req_tensors.device
        req_idx, place = staged([list(req_indices), [*chain.from_iterable(places)]], device)
        index = (self.req_tensors.num_computed_tokens[req_idx] + place).clamp(min=0)
        rows = self.pool.k[:, self.req_tensors.slot_mapping(req_idx, index), 0]
        return RoutedRows(spans, widths, Download(rows.transpose(0, 1).flatten(1)))


def found_before(plan: SpanPlan, request: RunnerRequest) -> int:
    """Tokens that a request found computed when it got its seat: their experts come with its first span."""
    return plan.start if plan.start == request.new_request.num_computed_tokens else 0


def routed_experts(
    record: RoutingRecord | None, pool: KVPool | None, req_tensors: DeviceRequests
) -> ExpertPages | None:
    """None: nobody wants to know."""
    return None if record is None or pool is None else ExpertPages(record, pool, req_tensors)
