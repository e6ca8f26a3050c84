"""What a request does to logits, rule by rule, against numbers that are written down here."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, inf

from mtpserve.core.plan import NewRequest
from mtpserve.core.request import Request
from mtpserve.core.sampling import SamplingParams
from mtpserve.core.spec_sizes import SpecSizes
from mtpserve.runtime.admissions import seat
from mtpserve.runtime.device_requests import DeviceRequests
from mtpserve.runtime.runner_request import RunnerRequest
from mtpserve.runtime.sampling.rules import BatchRules, LogitRules, biases
from mtpserve.runtime.sampling.sampling import SamplingState

VOCAB, EOS, SEATS, CPU = 6, 5, 2, torch.device("cpu")


def record(number: int, tokens: list[int], prompt: int, words: list[list[int]] | None = None, **params: Any) -> RunnerRequest:
    sampling = SamplingParams(**params, bad_words=("x",) * bool(words))
    request = Request(f"r{number}", tokens[:prompt], sampling, words or [], seed=0)
    return RunnerRequest(NewRequest(number, request, tokens[prompt:], 0, 99))


class Rows:
    """The rules of some requests, as a step has them."""

    def __init__(self, *requests: RunnerRequest) -> None:
        self.seats = DeviceRequests(SEATS, 16, SpecSizes(), VOCAB, 16, CPU, (EOS,))
        self.rules = LogitRules(self.seats, SEATS, VOCAB, (EOS,), (), CPU)
        self.sampling = SamplingState(SEATS, self.rules, CPU)
        self.admit(*requests)

    def admit(self, *requests: RunnerRequest) -> None:
        seat(requests, [], self.seats, self.sampling)
        groups = self.rules.groups(requests)
        assert groups is not None
        self.batch = BatchRules(self.rules, requests, groups, [torch.tensor(each) for each in groups.lists])

    def of(self, number: int, *path: int, logits: list[float] | None = None) -> list[float]:
        """The logits of the row after so many drafts."""
        given = torch.tensor([logits or [0.0] * VOCAB])
        drafts = torch.tensor([[*path, *[0] * (4 - len(path))]])
        found: Tensor = self.batch.apply(given, torch.tensor([number]), drafts, torch.tensor([len(path)]))
        return found[0].tolist()


def test_a_text_has_its_least_number_of_tokens_before_it_ends() -> None:
    rows = Rows(record(0, [1, 2, 3], prompt=2, min_tokens=3))
    assert [rows.of(0, *path)[EOS] for path in ([], [4], [4, 4])] == [-inf, -inf, 0.0]


def test_a_bad_word_is_one_of_the_output_and_of_its_own_request() -> None:
    begun, ended, other = record(0, [1, 3], 1, [[3, 4]], max_tokens=9), record(1, [1, 3], 2, [[3, 4]]), record(1, [1, 3], 1)
    rows = Rows(begun, ended)
    assert rows.of(0)[4] == -inf and rows.of(1)[4] == 0.0, "what the prompt ends with is not written"
    assert rows.of(1, 3)[4] == -inf and rows.of(1, 3, 2)[4] == 0.0
    assert Rows(begun, other).of(1)[4] == 0.0


def test_penalties() -> None:
    logits = [-2.0, 2.0, -2.0, 2.0, 2.0, 0.0]
    repetition = Rows(record(0, [0, 1, 2], prompt=2, repetition_penalty=2.0)).of(0, 3, logits=logits)
    assert repetition == [-4.0, 1.0, -4.0, 1.0, 2.0, 0.0], "of prompt, output and path"
    both = Rows(record(0, [0, 2, 2], prompt=1, frequency_penalty=0.5, presence_penalty=1.0)).of(0, 2, 3)
    assert both == [0.0, 0.0, -2.5, -1.5, 0.0, 0.0], "of output and path"


def test_a_seat_s_next_request_is_not_penalised_for_the_last_one() -> None:
    rows = Rows(record(0, [0, 2, 2], prompt=1, frequency_penalty=0.5, repetition_penalty=2.0))
    rows.admit(record(0, [1, 3], prompt=1, frequency_penalty=0.5, repetition_penalty=2.0))
    assert rows.of(0, logits=[1.0] * VOCAB) == [1.0, 0.5, 1.0, 0.0, 1.0, 1.0]


def test_a_bias_allows_nothing_that_is_not_allowed() -> None:
    one = record(0, [1], 1, allowed_token_ids=(1, 2), logit_bias={1: 2.0, 3: 5.0})
    assert biases(one) == {1: 2.0, 2: 0.0, 3: -inf}
    assert Rows(one).of(0) == [-inf, 2.0, 0.0, -inf, -inf, -inf]


def test_which_rules_leave_nothing() -> None:
    rules, told = Rows(record(0, [1, 2], 1, max_tokens=9, allowed_token_ids=(2,))).rules, "nothing is left that this request allows: "
    word = record(0, [1, 2], 1, [[2, 3]], allowed_token_ids=(3,))
    assert rules.nothing_allowed(word, [0]) == told + "allowed_token_ids, bad_words"
    assert rules.nothing_allowed(record(0, [1, 3], 1, [[2, 3]], allowed_token_ids=(3,)), [0]) is None
    assert rules.nothing_allowed(record(0, [1, 3], 1, [[2, 3]], allowed_token_ids=(2, 3)), [2, 0]) is None
    assert rules.nothing_allowed(record(0, [1, 3], 1, [[2, 3]], allowed_token_ids=(3,)), [2, 0]) is not None, "behind an accepted draft"
    early = {"allowed_token_ids": (EOS,), "min_tokens": 2}
    assert rules.nothing_allowed(record(0, [1, 2], 1, **early), [0]) == told + "allowed_token_ids, min_tokens"
    assert rules.nothing_allowed(record(0, [1, 2, 3], 1, **early), [0]) is None
    assert rules.nothing_allowed(record(0, [1], 1, **early, ignore_eos=True), [0]) is None
    assert rules.nothing_allowed(record(0, [1], 1), [0]) is None, "its numbers are not finite for another reason"
