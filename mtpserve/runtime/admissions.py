"""A plan's admissions and new pages, written to the seats' tensors: one copy to the device, and writes by
index there.

Nothing here makes the host wait for the device, so that arrivals do not drain the steps in flight.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence as Seq

import torch
from torch import Tensor

from mtpserve.cache.states import States
from mtpserve.core.errors import InvalidRequest
from mtpserve.core.plan import BlockTableEntry, NewRequest
from mtpserve.core.protocols.grammars import GrammarCompiler
from mtpserve.core.sampling import SamplingParams
from mtpserve.runtime.device_requests import STOPS, DeviceRequests
from mtpserve.runtime.lora.device_adapters import DeviceAdapters
from mtpserve.runtime.runner_request import RunnerRequest
from mtpserve.runtime.sampling.rules import LogitRules, biases
from mtpserve.runtime.sampling.sampling import SamplingState
from mtpserve.runtime.transfer import bits, floats, staged

log = logging.getLogger(__name__)

INTEGERS = 10  # of a request, before its stop tokens
NUMBERS = 6


def admitted(
    new_requests: Seq[NewRequest], grammars: GrammarCompiler | None, adapters: DeviceAdapters | None
) -> list[RunnerRequest]:
    """One whose grammar does not compile, or whose adapter cannot be read, is refused."""
    requests = [RunnerRequest(new_request) for new_request in new_requests]
    for request in requests:
        spec, lora = request.sampling.grammar, request.request.lora
        try:
            if lora is not None:
                if adapters is None:
                    raise InvalidRequest(f"this runner has no adapters, got {lora.lora_name!r}", "model")
                adapters.require(lora)
            if spec is None:
                continue
            if grammars is None:
                raise InvalidRequest(
                    f"{spec.kind} needs the model's tokenizer, and this runner has none", spec.kind
                )
            request.grammar = grammars.compile(spec)
        except Exception as error:
            log.exception("request %s could not be admitted", request.id, extra={"request_id": request.id})
            request.refuse(error)
    return requests


def seat(
    requests: Seq[RunnerRequest],
    entries: Seq[BlockTableEntry],
    req_tensors: DeviceRequests,
    sampling: SamplingState,
) -> None:
    """`requests` are those of requests that were admitted just now."""
    biased = [
        (request.req_idx, token, bias)
        for request in requests
        if request.has_bias
        for token, bias in biases(request).items()
    ]
    parts = iter(
        staged(
            [
                [number for entry in entries for number in entry],
                [request.req_idx for request in requests],
                [number for request in requests for number in integers(request, req_tensors.eos_ids)],
                bits([number for request in requests for number in numbers(request.sampling)]),
                [row for row, _, _ in biased],
                [token for _, token, _ in biased],
                bits([bias for _, _, bias in biased]),
                *(request.tokens for request in requests),
                *(request.request.prediction for request in requests),
            ],
            req_tensors.device,
        )
    )
    if entries:
        groups, rows, columns, ids = next(parts).view(-1, 4).unbind(1)
        req_tensors.block_tables[groups, rows, columns] = ids
    else:
        next(parts)
    if not requests:
        return
    req_indices, integer_values, real = (
        next(parts),
        next(parts).view(-1, INTEGERS + STOPS),
        floats(next(parts)).view(-1, NUMBERS),
    )
    req_tensors.counts[:, req_indices] = integer_values[:, :5].T
    req_tensors.stops[req_indices] = integer_values[:, INTEGERS:]
    req_tensors.done.index_fill_(0, req_indices, False)
    sampling.integers[:, req_indices] = integer_values[:, 5:7].T
    sampling.coupled[req_indices] = integer_values[:, 7].bool()
    sampling.rules.least[req_indices] = integer_values[:, 8]
    if req_tensors.adapters is not None:
        req_tensors.adapters.seat(requests, req_indices, integer_values[:, 9])
    sampling.numbers[:, req_indices] = real[:, :3].T
    sampling.rules.penalties[req_indices] = real[:, 3:]
    write_biases(sampling.rules, requests, req_indices, next(parts), next(parts), floats(next(parts)))
    for request in requests:
        tokens = next(parts)
        req_tensors.tokens[request.req_idx, : len(tokens)].copy_(tokens)
        if request.has_penalty:
            sampling.rules.count(request.req_idx, tokens, request.num_prompt_tokens)
    for request in requests:
        req_tensors.predict(request.req_idx, next(parts))


def start_states(new_requests: Seq[NewRequest], states: States) -> None:
    prefix_hits = [request for request in new_requests if request.start_state >= 0]
    lists = [
        [request.req_idx for request in new_requests],
        [request.num_computed_tokens for request in new_requests],
    ]
    lists += [[request.start_state for request in prefix_hits], [request.req_idx for request in prefix_hits]]
    states.start(*staged(lists, states.computed.device))


def integers(request: RunnerRequest, eos_ids: Collection[int]) -> list[int]:
    """[INTEGERS + STOPS]"""
    new_request, params, seed = request.new_request, request.sampling, request.request.seed
    assert seed is not None
    ends = dict.fromkeys([*(() if params.ignore_eos else eos_ids), *params.stop_token_ids])
    return [
        *(
            new_request.num_tokens,
            new_request.num_computed_tokens,
            request.num_prompt_tokens,
            new_request.max_num_tokens,
            0,
        ),
        *(max(params.top_k, 0), seed),
        int(new_request.point_masses),
        params.min_tokens,
        new_request.adapter_slot,
        *[*ends, *[-1] * STOPS][:STOPS],
    ]


def numbers(params: SamplingParams) -> tuple[float, ...]:
    """[NUMBERS]"""
    return (
        *(0.0 if params.greedy else params.temperature, params.top_p, params.min_p),
        *(params.repetition_penalty, params.frequency_penalty, params.presence_penalty),
    )


def write_biases(
    rules: LogitRules,
    requests: Seq[RunnerRequest],
    req_indices: Tensor,
    rows: Tensor,
    tokens: Tensor,
    values: Tensor,
) -> None:
    asking = [request for request in requests if request.has_bias]
    if not asking and rules.bias is None:
        return
    bias = rules.bias_table()
    bias.index_fill_(0, req_indices, 0.0)
    for request in asking:
        if request.sampling.allowed_token_ids:
            bias[request.req_idx].fill_(-torch.inf)
    if asking:
        bias[rows, tokens] = values
