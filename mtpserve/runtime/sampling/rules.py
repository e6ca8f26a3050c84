"""What a request does to logits before temperature: bias, forbidden and allowed tokens, penalties,
processors, its grammar.

Every rule looks at the tokens before the one that is chosen: the committed ones, and the path of proposed
tokens that leads to the row. So it holds in the same way for plain decoding, for each place of a chain, for
each node of a tree, and for the choice of the proposals themselves. A batch in which no request has a rule
has no BatchRules and pays nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mtpserve.core.batch import Batch, RequestTensors, VerifyOutput
from mtpserve.core.plan import NOTHING_ALLOWED
from mtpserve.core.protocols.logits_processor import LogitsProcessor
from mtpserve.runtime.runner_request import RunnerRequest
from mtpserve.runtime.sampling.grammar import GrammarRules
from mtpserve.runtime.sampling.rule_tables import MaskTable, TableRules
from mtpserve.runtime.transfer import upload, write

log = logging.getLogger(__name__)


class LogitRules:
    """rule_tables.RuleTables. The tables [seats, vocabulary] exist from the first request on that needs them,
    or from the first captured step with rules."""

    def __init__(
        self,
        req_tensors: RequestTensors,
        number: int,
        vocab: int,
        eos_ids: Collection[int],
        processors: Seq[LogitsProcessor],
        device: torch.device,
        max_masks: int | None = None,
    ) -> None:
        """`max_masks`: of one request in one captured step; None: no step is captured."""
        self.req_tensors, self.vocab, self.eos_ids, self.processors, self.device = (
            req_tensors,
            vocab,
            tuple(eos_ids),
            processors,
            device,
        )
        self.number = number = number + 1  # one more seat pads batches
        self.max_masks = max_masks
        self.masks: MaskTable | None = None
        self.bias: Tensor | None = None  # float32, added
        self.prompt: Tensor | None = None  # bool, is in the prompt
        self.counts: Tensor | None = None  # int64, how often it is in the output
        self.penalties = torch.zeros(number, 3, device=device)  # repetition, frequency, presence
        write(self.penalties[-1], (1.0, 0.0, 0.0))  # what pads a batch stays finite
        self.least = torch.zeros(number, dtype=torch.int64, device=device)  # min_tokens

    @property
    def table_bytes(self) -> int:
        """Bytes of bias, prompt, counts and masks, if all are there."""
        rows, words = self.mask_shape if self.max_masks is not None else (0, 0)
        return self.number * self.vocab * (4 + 1 + 8) + rows * words * 4

    @property
    def mask_shape(self) -> tuple[int, int]:
        assert self.max_masks is not None
        # Those that forbid nothing come first. The last request's may be fewer than a graph reads for it.
        return (self.number + 2) * self.max_masks, -(-self.vocab // 32)

    def mask_table(self) -> MaskTable:
        if self.masks is None:
            words = torch.zeros(self.mask_shape, dtype=torch.int32, device=self.device)
            shifts = torch.arange(8, dtype=torch.uint8, device=self.device)
            self.masks = MaskTable(words, torch.arange(self.max_masks or 0, device=self.device), shifts)
        return self.masks

    def bias_table(self) -> Tensor:
        if self.bias is None:
            self.bias = torch.zeros(self.number, self.vocab, device=self.device)
        return self.bias

    def count_tables(self) -> tuple[Tensor, Tensor]:
        """Returns `prompt` and `counts`."""
        if self.prompt is None or self.counts is None:
            self.prompt = torch.zeros(self.number, self.vocab, dtype=torch.bool, device=self.device)
            self.counts = torch.zeros(self.number, self.vocab, dtype=torch.int64, device=self.device)
        return self.prompt, self.counts

    def count(self, req_idx: int, tokens: Tensor, prompt_len: int) -> None:
        """Take up a request with penalties: `tokens` [n] on the device, output that it has already
        included."""
        prompt, counts = self.count_tables()
        output = tokens[prompt_len:]
        prompt[req_idx].zero_().index_fill_(0, tokens[:prompt_len], True)
        counts[req_idx].zero_().index_add_(0, output, torch.ones_like(output))

    def ends(self, request: RunnerRequest) -> set[int]:
        """The tokens that end the request's output."""
        params = request.sampling
        return {*params.stop_token_ids, *(() if params.ignore_eos else self.eos_ids)}

    def needs_host(self, request: RunnerRequest) -> bool:
        """True if some rule of the request is not in tables of the device (rule_tables.py), or it has a
        prediction, so that its steps cannot be captured. Most grammars can (constraints.py)."""
        if request.is_simple:
            return bool(self.processors)
        stops = request.is_below_min_tokens and len(self.ends(request)) > self.req_tensors.stops.shape[1]
        proposes_here = request.has_prediction or request.needs_masked_proposals
        return bool(self.processors or request.host_rules or proposes_here or stops)

    def groups(self, requests: Seq[RunnerRequest]) -> RuleGroups | None:
        """None: no rule applies to any of these requests."""
        if not self.processors and not any(request.has_rules for request in requests):
            return None
        worded: dict[tuple[tuple[int, ...], ...], list[int]] = {}
        blocked_stops: dict[tuple[int, ...], list[int]] = {}
        most_stops = self.req_tensors.stops.shape[1]
        for request in requests:
            if request.bad_words:
                worded.setdefault(request.bad_words, []).append(request.req_idx)
            if request.is_below_min_tokens and len(ends := self.ends(request)) > most_stops:
                blocked_stops.setdefault(tuple(sorted(ends)), []).append(request.req_idx)
        return RuleGroups(worded, blocked_stops)

    def nothing_allowed(self, request: RunnerRequest, tokens: Seq[int]) -> str | None:
        """The error of a request whose rules exclude every token at one of the places of `tokens`, which
        follow those that it has; None: some token was allowed at each."""
        output = request.tokens[request.num_prompt_tokens :]
        if not any(self.excludes_all(request, [*output, *tokens[:place]]) for place in range(len(tokens))):
            return None
        params = request.sampling
        fields = ("allowed_token_ids", "bad_words", "min_tokens", "grammar")
        return f"{NOTHING_ALLOWED}: {', '.join(field for field in fields if getattr(params, field))}"

    def excludes_all(self, request: RunnerRequest, output: list[int]) -> bool:
        params = request.sampling
        if request.grammar is not None:  # it goes before the other rules
            row = np.empty((1, -(-self.vocab // 32)), dtype=np.int32)
            request.grammar.masks([output[request.grammar_tokens :]], row)
            return not row.any()
        excluded = {token for token, bias in biases(request).items() if bias == -torch.inf}
        for *rest, last in request.bad_words:
            if output[len(output) - len(rest) :] == rest:
                excluded.add(last)
        if len(output) < params.min_tokens:
            excluded |= self.ends(request)
        return excluded.issuperset(params.allowed_token_ids or range(self.vocab))


def biases(request: RunnerRequest) -> dict[int, float]:
    """Token → what its logit gets in every row of the request. Tokens that are not named get 0, or -inf where
    some are allowed."""
    params = request.sampling
    bias_by_token = dict.fromkeys(params.allowed_token_ids, 0.0)
    others = -torch.inf if params.allowed_token_ids else 0.0
    for token, bias in params.logit_bias.items():
        bias_by_token[token] = bias_by_token.get(token, others) + bias
    return bias_by_token | {word[0]: -torch.inf for word in request.request.bad_words if len(word) == 1}


@dataclass(frozen=True, slots=True)
class RuleGroups:
    """Seats by their rules, not one by one: many requests of one client have the same."""

    worded: dict[tuple[tuple[int, ...], ...], list[int]]  # words of several tokens that must not occur
    # stop tokens that may not come yet, of requests with more of them than the device's table holds
    blocked_stops: dict[tuple[int, ...], list[int]]

    @property
    def lists(self) -> list[Seq[int]]:
        """What BatchRules needs of them on the device."""
        device_lists: list[Seq[int]] = []
        for words, seats in self.worded.items():
            device_lists += [seats, *(word[:-1] for word in words)]
        for ends, seats in self.blocked_stops.items():
            device_lists += [seats, ends]
        return device_lists


@dataclass(frozen=True, slots=True)
class Words:
    words: tuple[tuple[int, ...], ...]
    seats: Tensor  # seats of requests that must not write them
    before: list[Tensor]  # the tokens of each word but its last


class BatchRules:
    """The rules of one step's requests. Rows of requests without rules pass through unchanged, to the last
    bit."""

    def __init__(
        self, rules: LogitRules, requests: Seq[RunnerRequest], groups: RuleGroups, lists: Seq[Tensor]
    ) -> None:
        """`lists` are those of the groups, on the device."""
        self.rules, self.req_tensors = rules, rules.req_tensors
        self.by_seat = {request.req_idx: request for request in requests}
        # tokens committed by this step's verdict, which the records do not have yet
        self.fresh: dict[int, list[int]] = {}
        self.tables = TableRules(
            rules,
            any_bias=any(request.has_bias for request in requests),
            any_penalty=any(request.has_penalty for request in requests),
            any_min_tokens=any(request.is_below_min_tokens for request in requests),
        )
        parts: Iterator[Tensor] = iter(lists)
        self.worded = [Words(words, next(parts), [next(parts) for _ in words]) for words in groups.worded]
        self.blocked_stops = [(next(parts), next(parts)) for _ in groups.blocked_stops]  # seats, stop tokens
        self.grammars = GrammarRules(requests, rules.vocab)

    def apply(self, logits: Tensor, req_indices: Tensor, path: Tensor, count: Tensor) -> Tensor:
        raw = logits
        logits = self.tables.apply(logits, req_indices, path, count)
        for words in self.worded:
            logits = self.without_words(logits, words, req_indices, path, count)
        for held_indices, ends in self.blocked_stops:
            logits = self.without_end(logits, ends, torch.isin(req_indices, held_indices), req_indices, count)
        if not self.rules.processors and not self.grammars:
            return logits
        owners, paths = req_indices.tolist(), path.tolist()
        since = [
            [*self.fresh.get(req_idx, ()), *row[:n]]
            for req_idx, row, n in zip(owners, paths, count.tolist(), strict=True)
        ]
        for processor in self.rules.processors:
            logits = self.customised(logits, processor, owners, since)
        return self.grammars.apply(logits, raw, owners, since)

    def advance(self, batch: Batch, verify_output: VerifyOutput) -> None:
        """Called before the seats move on."""
        self.tables.advance(batch, verify_output)
        if self.rules.processors or self.grammars:
            rows = zip(
                batch.req_indices.tolist(),
                verify_output.tokens.tolist(),
                verify_output.num_accepted_tokens.tolist(),
                batch.samples.tolist(),
                strict=True,
            )
            self.fresh = {
                req_idx: tokens[: accepted + 1] if samples else []
                for req_idx, tokens, accepted, samples in rows
            }

    def forced(self, limit: int, req_indices: Tensor) -> tuple[Tensor, Tensor] | None:
        forced = self.grammars.forced(limit, req_indices.tolist(), self.fresh)
        if forced is None:
            return None
        padded = [tokens + [0] * (limit - len(tokens)) for tokens in forced]
        return upload(padded, req_indices.device), upload(
            [len(tokens) for tokens in forced], req_indices.device
        )

    # -- the rules -------------------------------------------------------------------------------------------

    def without_words(
        self, logits: Tensor, words: Words, req_indices: Tensor, path: Tensor, count: Tensor
    ) -> Tensor:
        """A word's last token is forbidden where the output ends with the rest of it."""
        owned, longest = torch.isin(req_indices, words.seats), max(map(len, words.before))
        length = self.req_tensors.num_tokens[req_indices]
        tail = length.unsqueeze(1) - longest + torch.arange(longest, device=logits.device)
        history = torch.cat([self.req_tensors.tokens[req_indices.unsqueeze(1), tail.clamp(min=0)], path], 1)
        num_output_tokens = length + count - self.req_tensors.num_prompt_tokens(req_indices)
        logits = logits.clone()
        for word, rest in zip(words.words, words.before, strict=True):
            before = len(rest)
            columns = (longest + count - before).unsqueeze(1) + torch.arange(before, device=logits.device)
            same = (history.gather(1, columns) == rest).all(1)
            logits[:, word[-1]].masked_fill_(same & (num_output_tokens >= before) & owned, -torch.inf)
        return logits

    def without_end(
        self, logits: Tensor, ends: Tensor, owned: Tensor, req_indices: Tensor, count: Tensor
    ) -> Tensor:
        num_output_tokens = (
            self.req_tensors.num_tokens[req_indices] + count - self.req_tensors.num_prompt_tokens(req_indices)
        )
        early = owned & (num_output_tokens < self.rules.least[req_indices])
        logits = logits.clone()
        logits[:, ends] = logits[:, ends].masked_fill(early.unsqueeze(1), -torch.inf)
        return logits

    def customised(
        self, logits: Tensor, processor: LogitsProcessor, owners: list[int], since: list[list[int]]
    ) -> Tensor:
        """`owners` are the rows' requests, `since` the tokens between what the records have and the row."""
        out = logits.clone()
        for row, (req_idx, path) in enumerate(zip(owners, since, strict=True)):
            request = self.by_seat[req_idx]
            try:
                new_logits = processor(
                    request.tokens + path,
                    request.num_prompt_tokens,
                    request.sampling.custom_params,
                    logits[row],
                )
                out[row] = new_logits
            except Exception:
                # The operator's code failed for this request: it ends, as one whose numbers went bad, and no
                # other does.
                log.exception(
                    "logits processor %s failed for request %s",
                    type(processor).__name__,
                    request.id,
                    extra={"request_id": request.id},
                )
                out[row].fill_(torch.nan)
        return out
