"""Arithmetic: percentiles, latencies of tokens that come together, goodput, cost, concurrency, the knee."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy
import pytest

from mtpserve.tools.bench.dataset.arrivals import arrival_times
from mtpserve.tools.bench.serve.measured import Arrival, Failure, Measured, OwnFigures, Sent, shares
from mtpserve.tools.bench.serve.run import RawRun
from mtpserve.tools.bench.serve.summary import Summary, SummaryOptions, peak_of, percentile, spread, summarise
from mtpserve.tools.bench.serve.sweep import Point, knee, largest_power, power

ONE = Measured(
    Sent(0.0, 0.5, 1.0),
    5.0,
    arrivals=(Arrival(2.0, 2), Arrival(3.0, 4), Arrival(5.0, 1)),
    prompt_tokens=10,
    output_tokens=7,
    meant=10,
    max_tokens=7,
)


def made(*requests: Measured, **options: object) -> Summary:
    return summarise(RawRun(requests, 0.0, client_cpu=0.5), SummaryOptions(**options))  # type: ignore[arg-type]


def test_percentiles_are_numpys() -> None:
    dice = Random(1)
    for count in (1, 2, 7, 100):
        values = sorted(dice.random() for _ in range(count))
        for share in (0, 12.5, 50, 90, 99, 100):
            assert percentile(values, share) == pytest.approx(float(numpy.percentile(values, share)), abs=1e-12)
    found = spread([3.0, None, 1.0, 2.0])
    assert found is not None and (found.count, found.mean, found.median, found.max) == (3, 2, 2, 3)
    assert found.std == pytest.approx(float(numpy.std([1, 2, 3]))) and spread([None]) is None


def test_tokens_that_come_together_share_the_wait() -> None:
    assert (ONE.ttft, ONE.e2e, ONE.from_planned) == (1.0, 4.0, 5.0)
    assert ONE.gaps == [0.25] * 4 + [2.0] and ONE.tpot == 3 / 6
    assert (ONE.sent.lateness, ONE.sent.slot_wait) == (0.5, 0.5)


def test_what_was_not_streamed_has_an_end_only() -> None:
    whole = replace(ONE, streamed=False, arrivals=(Arrival(5.0, 7),))
    assert (whole.ttft, whole.tpot, whole.gaps, whole.e2e) == (None, None, [], 4.0)


def test_one_token_has_no_time_per_token() -> None:
    assert replace(ONE, arrivals=(Arrival(2.0, 1),), output_tokens=1).tpot is None


@pytest.mark.parametrize(
    ("total", "weights", "parts"), [(6, [1, 2], [2, 4]), (7, [1, 1], [4, 3]), (5, [0, 0], [3, 2]), (1, [1, 8], [0, 1])]
)
def test_shares_sum_up(total: int, weights: list[int], parts: list[int]) -> None:
    assert shares(total, weights) == parts and sum(parts) == total


def test_rates_and_failures() -> None:
    bad = replace(ONE, failure=Failure("HTTP 429", "full"), end=6.0)
    other = replace(ONE, failure=Failure("disconnected"), output_tokens=3)
    summary = made(ONE, bad, other, replace(bad, end=10.0), open_loop=True)
    assert (summary.requests, summary.completed, summary.seconds) == (4, 1, 10.0)
    assert (summary.request_throughput, summary.output_throughput, summary.input_throughput) == (0.1, 0.7, 1.0)
    assert summary.total_throughput == pytest.approx(1.7) and summary.peak_output == 4
    assert summary.failures == (("HTTP 429", 2, "full"), ("disconnected", 1, ""))
    assert summary.per_user is not None and summary.per_user.mean == 2.0
    assert summary.lateness is not None and summary.lateness.max == 0.5 and summary.client_load == 0.05
    assert made(ONE).lateness is None, "all at once: nobody has a time"


def test_nothing_completed() -> None:
    summary = made(replace(ONE, failure=Failure("HTTP 503")), price_per_hour=1.0, goodput={"ttft": 1.0})
    assert (summary.completed, summary.ttft, summary.price, summary.goodput) == (0, None, None, 0)
    assert made().seconds == 0 and made().request_throughput == 0


def test_goodput_counts_requests_within_all_limits() -> None:
    slow = replace(ONE, end=9.0)
    whole = replace(ONE, streamed=False)
    assert made(ONE, slow, goodput={"ttft": 1.0, "e2el": 4.0}).goodput == 1 / 9
    assert made(ONE, slow, goodput={"tpot": 0.5}).goodput == 2 / 9
    assert made(ONE, goodput={"tpot": 0.49}).goodput == 0
    assert made(whole, goodput={"e2el": 4.0}).goodput == 1 / 5 and made(whole, goodput={"ttft": 9.0}).goodput == 0


def test_cost_is_divided_by_the_ratio() -> None:
    requests = [replace(ONE, prompt_tokens=600, output_tokens=100, end=3600.0)]
    price = made(*requests, price_per_hour=2.0, output_price_ratio=4.0).price
    assert price is not None and price.total == pytest.approx(2.0)
    assert price.per_million_input == pytest.approx(2e6 / 1000) and price.per_million_output == pytest.approx(4 * 2e6 / 1000)
    assert 600 * price.per_million_input + 100 * price.per_million_output == pytest.approx(2e6)
    assert price.per_million_output_alone == pytest.approx(2e4)


def test_who_runs_at_once() -> None:
    def at(start: float, end: float) -> Measured:
        return Measured(Sent(0, 0, start), end)

    assert peak_of([at(0, 2), at(1, 3), at(2, 4), at(5, 6)]) == 2
    assert made(at(0, 2), at(1, 3), at(2, 4)).concurrency == 6 / 4


def test_prompts_against_what_was_meant() -> None:
    prompts = made(ONE, replace(ONE, prompt_tokens=12), replace(ONE, meant=None)).prompts
    assert prompts is not None and (prompts.compared, prompts.differ, prompts.mean_difference, prompts.largest) == (2, 1, 1.0, 2)
    assert made(ONE, replace(ONE, max_tokens=9)).short == 1


def test_categories() -> None:
    a = replace(ONE, category="a", figures=OwnFigures(2, 6, 3))
    summary = made(a, replace(a, output_tokens=3), replace(ONE, category="b"))
    first, second = summary.categories
    assert (first.name, first.requests, first.output_tokens, first.tokens_per_step, first.rate) == ("a", 2, 10, 2.5, 0.5)
    assert (second.name, second.tokens_per_step, second.rate) == ("b", None, None)


def test_the_knee_is_the_largest_power() -> None:
    def point(load: float, tokens: int, seconds: float) -> Point:
        """`tokens` in one second, by requests that take `seconds`."""
        return Point(load, made(Measured(Sent(0, 0, 1 - seconds), 1.0, output_tokens=tokens)))

    points = [point(1, 10, 0.1), point(2, 19, 0.12), point(4, 30, 0.15), point(8, 31, 0.4)]
    assert [round(power(each.summary)) for each in points] == [100, 158, 200, 78] and knee(points) == 2
    assert knee(points[:3]) is None and knee(points[2:] * 2) is None, "at an end of the sweep"
    assert largest_power(points[:3]) == 2
    assert knee(points[:2]) is None and knee([Point(1, made())] * 3) is None


def test_times_are_drawn_in_advance() -> None:
    times = arrival_times(1000, 4.0, 1.0, Random(1))
    assert times == arrival_times(1000, 4.0, 1.0, Random(1)) != arrival_times(1000, 4.0, 1.0, Random(2))
    assert list(times) == sorted(times) and times[-1] == pytest.approx(250.0)
    assert arrival_times(3, float("inf"), 1.0, Random(1)) == (0, 0, 0) and arrival_times(0, 1.0, 1.0, Random(1)) == ()

    def variation(burstiness: float) -> float:
        gaps = numpy.diff(arrival_times(4000, 4.0, burstiness, Random(1)))
        return float(gaps.std() / gaps.mean())

    # Of a gamma distribution: 1 / sqrt(burstiness).
    assert [variation(each) for each in (0.25, 1.0, 100.0)] == pytest.approx([2, 1, 0.1], rel=0.1)
