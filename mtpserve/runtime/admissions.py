"""A plan's admissions and new pages, written to the seats' tensors: one copy to the device, and writes by index there.

Nothing here makes the host wait for the device, so that arrivals do not drain the steps in flight.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence as Seq

import torch
from torch import Tensor

from mtpserve.cache.states import States
from mtpserve.core.plan import Admission, NewPages
from mtpserve.core.sampling import SamplingParams
from mtpserve.runtime.records import Record
from mtpserve.runtime.sampling.rules import LogitRules, biases
from mtpserve.runtime.sampling.sampling import SeatSampling
from mtpserve.runtime.seats import STOPS, SeatTensors
from mtpserve.runtime.transfer import bits, floats, staged

INTEGERS = 9  # of a request, before its stop tokens
NUMBERS = 6


def seat(records: Seq[Record], pages: Seq[NewPages], seats: SeatTensors, sampling: SeatSampling) -> None:
    """`records` are those of requests that were admitted just now."""
    biased = [(record.seat, token, bias) for record in records if record.asks_bias for token, bias in biases(record).items()]
    entries = [(each.group, each.seat, column, page) for each in pages for column, page in enumerate(each.pages, each.first)]
    parts = iter(
        staged(
            [
                [number for entry in entries for number in entry],
                [record.seat for record in records],
                [number for record in records for number in integers(record, seats.eos_ids)],
                bits([number for record in records for number in numbers(record.sampling)]),
                [row for row, _, _ in biased],
                [token for _, token, _ in biased],
                bits([bias for _, _, bias in biased]),
                *(record.tokens for record in records),
                *(record.admission.prediction for record in records),
            ],
            seats.device,
        )
    )
    if entries:
        groups, rows, columns, ids = next(parts).view(-1, 4).unbind(1)
        seats.page_tables[groups, rows, columns] = ids
    else:
        next(parts)
    if not records:
        return
    seat_ids, whole, real = next(parts), next(parts).view(-1, INTEGERS + STOPS), floats(next(parts)).view(-1, NUMBERS)
    seats.counts[:, seat_ids] = whole[:, :5].T
    seats.stops[seat_ids] = whole[:, INTEGERS:]
    seats.done.index_fill_(0, seat_ids, False)
    sampling.integers[:, seat_ids] = whole[:, 5:7].T
    sampling.coupled[seat_ids] = whole[:, 7].bool()
    sampling.rules.least[seat_ids] = whole[:, 8]
    sampling.numbers[:, seat_ids] = real[:, :3].T
    sampling.rules.penalties[seat_ids] = real[:, 3:]
    write_biases(sampling.rules, records, seat_ids, next(parts), next(parts), floats(next(parts)))
    for record in records:
        tokens = next(parts)
        seats.tokens[record.seat, : len(tokens)].copy_(tokens)
        if record.asks_penalty:
            sampling.rules.count(record.seat, tokens, record.prompt_len)
    for record in records:
        seats.predict(record.seat, next(parts))


def start_states(admissions: Seq[Admission], states: States) -> None:
    found = [each for each in admissions if each.state >= 0]
    lists = [[each.seat for each in admissions], [each.computed for each in admissions]]
    lists += [[each.state for each in found], [each.seat for each in found]]
    states.start(*staged(lists, states.computed.device))


def integers(record: Record, eos_ids: Collection[int]) -> list[int]:
    """[INTEGERS + STOPS]"""
    given, params = record.admission, record.sampling
    ends = [*(() if params.ignore_eos else eos_ids), *params.stop_token_ids]
    return [
        *(len(given.tokens), given.computed, given.prompt_len, given.max_len, 0),
        *(max(params.top_k, 0), given.seed),
        int(given.point_masses),
        params.min_tokens,
        *[*ends, *[-1] * STOPS][:STOPS],
    ]


def numbers(params: SamplingParams) -> tuple[float, ...]:
    """[NUMBERS]"""
    return (
        *(0.0 if params.greedy else params.temperature, params.top_p, params.min_p),
        *(params.repetition_penalty, params.frequency_penalty, params.presence_penalty),
    )


def write_biases(rules: LogitRules, records: Seq[Record], seat_ids: Tensor, rows: Tensor, tokens: Tensor, values: Tensor) -> None:
    asking = [record for record in records if record.asks_bias]
    if not asking and rules.bias is None:
        return
    bias = rules.bias_table()
    bias.index_fill_(0, seat_ids, 0.0)
    for record in asking:
        if record.sampling.allowed_token_ids:
            bias[record.seat].fill_(-torch.inf)
    if asking:
        bias[rows, tokens] = values
