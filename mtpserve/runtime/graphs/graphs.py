"""Steps that are captured once and replayed: one launch on the host instead of hundreds.

A graph is a whole step (forward, accept, compact, absorb, draft) for a padded number of requests, each with
as many rows as the engine verifies. It is fed with req_idx, draft depths and draft counts; everything
else it reads from the seats on the device. The seat that belongs to no request pads it.

    requests   | a | b | c | - |     tier 4            rows of each   | x d1 d2 d3 |   fewer drafts are masked

Prompts have a padded number of rows in all, and a graph is fed with the number of each (prompt_rows.py).
Launched one by one, kernels of a short prompt took 36 ms on an H100 with 36 layers; a step without 4 ms.
Beside requests that decode they are computed in the same pass, and weights are read once; where
drafts may branch they have own graphs.

    rows       | a a a | b b b b | - | - - |      8 spans of 4 requests, at most 3 of which are real

All tiers are captured at start for the usual parameters; others when they are first needed, in the time of
dozens of steps. Those whose capture failed are launched.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence as Seq
from dataclasses import replace
from itertools import pairwise
from time import monotonic

import torch
from torch import Tensor

from mtpserve.core.batch import Batch
from mtpserve.core.plan import SpanPlan
from mtpserve.runtime.graphs.capture import CaptureFailed, GraphCapturer
from mtpserve.runtime.graphs.graph_key import CapturedGraph, GraphKey, GraphOutput, padded, tiers
from mtpserve.runtime.graphs.prompt_rows import (
    MIXED_PROMPTS,
    PROMPTS,
    Prompts,
    mixed_layout,
    padded_prompts,
    prompt_layout,
)
from mtpserve.runtime.inputs import RowLayout, build, row_layout
from mtpserve.runtime.runner_request import RunnerRequest
from mtpserve.runtime.sampling.rule_tables import RowMasks, TableRules
from mtpserve.runtime.sampling.sampling import BatchSampler, SamplingFeatures, SamplingState
from mtpserve.runtime.step import Step
from mtpserve.runtime.transfer import write

log = logging.getLogger(__name__)

MIXED_ROWS = (16, 32, 64, 128, 256)  # numbers of requests that decode beside prompts
DEPTHS = (1, 3)  # chains' depths, besides the engine's own
LOG_S = 10.0  # between two lines


def verified(plan: SpanPlan, request: RunnerRequest) -> int:
    """Drafts of a span. Where the host decides about a request's drafts, the plan may have a higher bound."""
    return (
        plan.num_draft_tokens if request.grammar is None else min(plan.num_draft_tokens, request.num_waiting)
    )


class StepGraphs:
    """`max_batch_size` requests in one graph, at most. The widths are the engine's own, a token and all
    drafts of a request, those of a few less deep chains, and a single row for steps that neither verify nor
    draft. Steps between them are masked: near the end of its text a request has fewer drafts for a step or
    two, which is not worth a capture."""

    def __init__(
        self, step: Step, sampling: SamplingState, capturer: GraphCapturer, max_batch_size: int
    ) -> None:
        self.step, self.sampling = step, sampling
        self.capturer, self.max_batch_size = capturer, max_batch_size
        self.drafts = step.drafter.sizes.max_draft_tokens(step.drafter.sizes.depth, plain=True)
        self.depths = sorted({depth for depth in DEPTHS if depth < self.drafts} | {self.drafts})
        self.captured: dict[GraphKey, CapturedGraph | None] = {}  # None: cannot be captured

    def recapture(self) -> StepGraphs:
        """New graphs for the step's drafter, in the same memory."""
        return StepGraphs(self.step, self.sampling, self.capturer, self.max_batch_size)

    def replay(
        self, req_indices: Seq[int], depths: Seq[int], max_draft_tokens: Seq[int], drafts: int,
        draft_depth: int, features: SamplingFeatures, trees: bool,
        deferred: bool = False, checkpoints: Seq[Seq[int]] = (), prompts: Prompts | None = None,
        masks: Seq[int] = (),
    ) -> CapturedGraph | None:  # fmt: skip
        """`drafts` of the widest span; `draft_depth`: how deep the step drafts; `deferred`: as in GraphKey;
        `checkpoints`: numbers of checkpoints, where layers keep states; `prompts`: the last ones of the
        requests; `masks`: the first mask of each request, see RowMasks. What it gives is overwritten by the
        next replay, on the device and in its order. None: such a step cannot be captured, or its prompts are
        too long, and nothing was done."""
        decoding, deepest = (
            len(req_indices) - (0 if prompts is None else len(prompts.lengths)),
            draft_depth if any(depths) else 0,
        )
        if prompts is None:
            key: GraphKey | None = self.key(decoding, drafts, deepest, features, trees, deferred)
        elif decoding:
            key = self.mixed_key(decoding, drafts, deepest, features, prompts, deferred)
        else:
            key = self.prompt_key(prompts, deepest, features)
        graph = None if key is None else self.captured[key] if key in self.captured else self.capture(key)
        if key is None or graph is None:
            return None
        # A chain's number of drafts is its depth, and those who are limited otherwise are not captured.
        max_draft_tokens = max_draft_tokens or [self.drafts] * len(req_indices)
        if not self.step.drafter.sizes.trees:
            depths = list(map(min, depths, max_draft_tokens))
        lists = (
            (req_indices, self.step.req_tensors.padding),
            (depths, 0),
            (max_draft_tokens, 0),
            *((column, 0) for column in checkpoints),
            *([(masks, 0)] if key.features.masks else []),
        )
        write(graph.request_numbers, [padded(numbers, decoding, filler, key) for numbers, filler in lists])
        if prompts is not None and graph.prompt_numbers is not None:
            write(graph.prompt_numbers, padded_prompts(prompts, key.rows, key.spans, key.requests))
        graph.replay()
        return graph

    @property
    def has_mixed_steps(self) -> bool:
        """True if one pass computes prompts and requests that decode: their drafts are chains."""
        return not self.step.drafter.sizes.trees

    def prompt_key(self, prompts: Prompts, deepest: int, features: SamplingFeatures) -> GraphKey | None:
        """The key for prompts alone. None: too many rows, or requests."""
        if (bucket := prompts.bucket(PROMPTS)) is None:
            return None
        rows, spans = bucket
        depth = self.depth_of(deepest) if deepest else 0
        # Seats in which drafts once branched, or not, and all parameters alike: it is few requests' sampling.
        trees = self.step.drafter.sizes.branching
        return GraphKey(
            0, 0, depth, trees, features.general, rows=rows, spans=spans, resumed=bool(prompts.resumed)
        )

    def mixed_key(
        self,
        requests: int,
        drafts: int,
        deepest: int,
        features: SamplingFeatures,
        prompts: Prompts,
        deferred: bool,
    ) -> GraphKey | None:
        """The key for prompts beside `requests` that decode. None: too many rows, or requests."""
        if (bucket := prompts.bucket(MIXED_PROMPTS)) is None:
            return None
        key = self.key(
            next(size for size in self.mixed_tiers if size >= requests),
            drafts,
            deepest,
            features,
            False,
            deferred,
        )
        sampling = features.rounded() if features.rounded().all_greedy else features.general
        # Whatever the prompts follow: a pass of the draft model over one row of each costs less than twice as
        # many captures.
        resumed = self.step.drafter.lag is not None
        return replace(key, features=sampling, rows=bucket[0], spans=bucket[1], resumed=resumed)

    @property
    def mixed_tiers(self) -> list[int]:
        return [
            size for size in tiers(self.max_batch_size) if size in MIXED_ROWS or size == self.max_batch_size
        ]

    def mixed_keys(
        self, features: SamplingFeatures, depth: int, budget: int, above: int, deferred: bool
    ) -> Iterator[GraphKey]:
        """The keys of steps of `budget` rows at most, the largest first: prompts beside more than `above`
        requests that draft `depth` deep."""
        for before, size in reversed([*pairwise([0, *self.mixed_tiers])]):
            decoding = (before + 1) * self.key(size, depth, depth, features, False).width
            for rows, spans in reversed(MIXED_PROMPTS) if size > above else ():
                prompts = Prompts([min(rows - spans, budget - decoding)], [])
                key = (
                    self.mixed_key(size, depth, depth, features, prompts, deferred)
                    if budget > decoding
                    else None
                )
                if key is not None:
                    yield key

    @property
    def used_depths(self) -> list[int]:
        """The depths of graphs that draft."""
        sizes = self.step.drafter.sizes
        return [sizes.depth] if sizes.trees or sizes.always_free else self.depths

    def depth_of(self, drafts: int) -> int:
        """The depth of the graph in which so many are drafted, or verified: of a tree more than it is
        deep."""
        *shallower, deepest = self.used_depths
        return next((depth for depth in shallower if depth >= drafts), deepest)

    def key(
        self,
        requests: int,
        drafts: int,
        deepest: int,
        features: SamplingFeatures,
        trees: bool,
        deferred: bool = False,
    ) -> GraphKey:
        size = next(tier for tier in tiers(self.max_batch_size) if tier >= requests)
        if drafts == 0 and deepest == 0:
            return GraphKey(size, 1, 0, False, features.rounded(), deferred)
        sizes = self.step.drafter.sizes
        # Grammars may force more than the draft model proposes.
        forced = features.masks and drafts > (self.drafts if sizes.trees else self.depth_of(deepest))
        # The step in which the depth changes is as wide as the deeper one.
        depth = self.depth_of(deepest if forced else max(drafts, deepest))
        width = self.drafts if sizes.trees or sizes.always_free else depth
        if forced:
            width = sizes.nodes if sizes.trees else sizes.depth
        assert drafts <= width
        return GraphKey(
            size,
            width + 1,
            depth,
            trees,
            features.rounded(),
        )

    def capture_all(
        self, features: Seq[SamplingFeatures], trees: bool, plain_above: int | None = None,
        adaptive: bool = False,
        prompts: int = PROMPTS[-1][0], shared: bool = False,
    ) -> None:  # fmt: skip
        """Every tier, the largest first: the memory of the others fits into its own. `plain_above`: with more
        requests than that the engine drafts nothing. `adaptive`: it drafts as deep as it thinks best.
        `prompts`: rows of a step, at most; `shared`: some may follow pages of another request."""
        sizes, deferred = tiers(self.max_batch_size)[::-1], self.step.drafter.sizes.max_deferred_tokens > 0
        depths = self.depths[::-1] if adaptive and self.drafts else [self.drafts]
        keys = [
            self.key(size, depth, depth, feature_set, trees)
            for size in sizes
            for depth in depths
            for feature_set in features
        ]
        if adaptive and self.drafts:
            plain_above = 0
        if plain_above is not None:
            keys += [
                self.key(size, 0, 0, feature_set, False, deferred)
                for size in sizes
                if size > plain_above
                for feature_set in features
            ]
            depths = [*depths, 0]
        for depth in depths if self.has_mixed_steps else []:
            above = 0 if depth or plain_above is None else plain_above
            keys += [
                key
                for feature_set in features
                for key in self.mixed_keys(feature_set, depth, prompts, above, deferred and not depth)
            ]
        both = ([], [0])[: 1 + (shared or self.step.drafter.lag == 0)]
        for rows in sorted({min(rows - spans, prompts) for rows, spans in PROMPTS}, reverse=True):
            alone = [Prompts([rows], resumed) for resumed in both]
            keys += [
                key
                for depth in depths
                for feature_set in features
                for one in alone
                if (key := self.prompt_key(one, depth, feature_set))
            ]
        keys = list(dict.fromkeys(keys))
        said = monotonic()
        for number, key in enumerate(keys, 1):
            self.capture(key)
            if monotonic() - said > LOG_S or number == len(keys):
                said = monotonic()
                log.info(
                    "CUDA graphs: %d of %d, for up to %d requests", number, len(keys), self.max_batch_size
                )

    @torch.inference_mode()
    def capture(self, key: GraphKey) -> CapturedGraph | None:
        step, device = self.step, self.step.req_tensors.device
        fillers = [
            step.req_tensors.padding,
            *(0, 0, *([0, 0] if step.states is not None else []), *([0] if key.features.masks else [])),
        ]
        request_numbers = torch.empty(
            len(fillers), key.requests + key.spans, dtype=torch.int64, device=device
        )
        write(request_numbers, [padded([], 0, filler, key) for filler in fillers])
        prompt_numbers = None
        if key.rows:
            prompt_numbers = torch.empty(3, key.spans, dtype=torch.int64, device=device)
            write(prompt_numbers, padded_prompts(Prompts([], []), key.rows, key.spans, key.requests))
        layout = self.layout(key) if key.requests else None

        def body() -> GraphOutput:
            rows, batch = self.batch(key, request_numbers, prompt_numbers, layout)
            hidden, verify_output, table = step.forward(batch)
            drafts = step.propose(batch, rows, hidden, verify_output)
            count, branches = (
                (None, False) if drafts is None else (drafts.num_draft_tokens, drafts.tree is not None)
            )
            return GraphOutput(table, count, branches, verify_output.logprobs)

        if key.features.rules:  # their tables outlive the graph, and are not in its memory
            self.sampling.rules.bias_table()
            self.sampling.rules.count_tables()
        if key.features.masks:
            self.sampling.rules.mask_table()
        try:
            output, replay = self.capturer.capture(body)
            max_drafts = max(key.width - 1, 0)
            self.captured[key] = CapturedGraph(
                key, request_numbers, prompt_numbers, layout, max_drafts, key.trees and max_drafts > 0,
                output, replay,
            )  # fmt: skip
            log.debug("captured: %s", key)
        except CaptureFailed as failure:
            self.captured[key] = None
            why = failure.__cause__ or failure
            first = str(why).partition("\n")[0]
            log.warning(
                "a step has no CUDA graph: %s: %s: %s",
                key,
                type(why).__name__,
                first,
            )
        return self.captured[key]

    def layout(self, key: GraphKey) -> RowLayout:
        """The layout of requests with equally many rows. The cache would forget it."""
        sizes = self.step.drafter.sizes
        spans = ((1, key.width - 1, True),) * key.requests
        return row_layout.__wrapped__(
            spans, self.step.req_tensors.device, sizes.depth if sizes.branching else None
        )

    def batch(
        self, key: GraphKey, request_numbers: Tensor, prompt_numbers: Tensor | None, layout: RowLayout | None
    ) -> tuple[RowLayout, Batch]:
        """`request_numbers`, `prompt_numbers`, `layout`: see CapturedGraph."""
        step, resumed = self.step, None
        req_indices, num_steps, max_draft_tokens, *checkpoints = request_numbers.unbind(0)
        tables, masks = key.features.rules, None
        if key.features.masks:
            masks = RowMasks(self.sampling.rules.mask_table(), checkpoints.pop())
        if prompt_numbers is not None:
            lengths, real, after_others = prompt_numbers.unbind(0)
            prompts = prompt_layout(lengths, real, key.rows)
            layout = prompts if layout is None else mixed_layout(layout, prompts)
            resumed = after_others if key.resumed else None
        assert layout is not None
        rules = TableRules(
            self.sampling.rules,
            any_bias=tables,
            any_penalty=tables,
            any_min_tokens=tables,
            masks=masks,
        )
        sampler = BatchSampler(self.sampling, key.features, rules if tables or masks is not None else None)
        batch = build(layout, step.req_tensors, req_indices, sampler, key.trees)._replace(
            resumed=resumed,
            draft_depth=key.max_steps,
            num_draft_steps=num_steps,
            max_draft_tokens=max_draft_tokens if step.drafter.sizes.trees else None,
            defers_kv=key.defers_kv,
            extends_kv=not key.defers_kv or key.rows > 0,
            # what the host has put in place of drafts is theirs no more
            has_trees=key.trees or masks is not None,
            has_adapters=key.features.adapters,
        )
        if checkpoints:
            batch = batch._replace(checkpoint_tokens=checkpoints[0], checkpoint_states=checkpoints[1])
        return layout, batch
