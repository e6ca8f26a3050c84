"""A run's figures. docs/bench.md defines each of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from mtpserve.tools.bench.serve.measured import Measured
from mtpserve.tools.bench.serve.run import RawRun

PERCENTILES = (90.0, 95.0, 99.0)
LATE = 0.010  # seconds; a p99 of lateness above it is a warning
BUSY = 0.9  # of one core; above it the client's own times are in doubt


@dataclass(frozen=True, slots=True)
class Spread:
    """Of some values, in their unit."""

    count: int
    mean: float
    std: float
    median: float
    percentiles: tuple[tuple[float, float], ...]  # (90, value), …
    max: float


@dataclass(frozen=True, slots=True)
class Price:
    """What a run cost, and how it is divided: an output token costs `ratio` input tokens."""

    total: float
    ratio: float
    per_million_input: float
    per_million_output: float
    per_million_output_alone: float  # if all of it is charged to the output


@dataclass(frozen=True, slots=True)
class CategoryFigures:
    name: str
    requests: int
    output_tokens: int
    tokens_per_step: float | None
    rate: float | None  # accepted / proposed
    tpot: Spread | None


@dataclass(frozen=True, slots=True)
class PromptCounts:
    """Prompt tokens as the server counts them, against those that were meant."""

    compared: int
    differ: int
    mean_difference: float
    largest: int


@dataclass(frozen=True, slots=True)
class Summary:
    """Times in seconds, rates per second. None: not measured."""

    requests: int
    completed: int
    seconds: float
    failures: tuple[tuple[str, int, str], ...]  # reason, number, an example of the server's words
    input_tokens: int
    output_tokens: int
    cached_tokens: int | None  # as the answers say
    ttft: Spread | None
    tpot: Spread | None
    itl: Spread | None
    e2e: Spread | None
    from_planned: Spread | None
    lateness: Spread | None
    slot_wait: Spread | None
    per_user: Spread | None  # tokens per second
    peak_concurrency: int
    peak_output: float  # most output tokens in one of the run's seconds
    goodput: float | None
    price: Price | None
    prompts: PromptCounts | None
    short: int  # answers with fewer tokens than asked for
    counted_by: tuple[tuple[str, int], ...]
    categories: tuple[CategoryFigures, ...]
    client_load: float  # CPU seconds of the client per second

    def per_second(self, amount: float) -> float:
        return amount / self.seconds if self.seconds > 0 else 0.0

    @property
    def request_throughput(self) -> float:
        return self.per_second(self.completed)

    @property
    def input_throughput(self) -> float:
        return self.per_second(self.input_tokens)

    @property
    def output_throughput(self) -> float:
        return self.per_second(self.output_tokens)

    @property
    def total_throughput(self) -> float:
        return self.per_second(self.input_tokens + self.output_tokens)

    @property
    def concurrency(self) -> float:
        """Mean number of requests at once."""
        return self.per_second(self.e2e.mean * self.e2e.count) if self.e2e is not None else 0.0


@dataclass(frozen=True, slots=True)
class SummaryOptions:
    percentiles: tuple[float, ...] = PERCENTILES
    goodput: Mapping[str, float] | None = None  # ttft, tpot, e2el → seconds that a good request takes at most
    price_per_hour: float | None = None
    output_price_ratio: float = 4.0
    open_loop: bool = False  # requests had times of their own


def percentile(ordered: Sequence[float], share: float) -> float:
    """`share` in percent, of rising values; linear between two of them, as numpy's default."""
    place = (len(ordered) - 1) * share / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def spread(values: Iterable[float | None], percentiles: Sequence[float] = PERCENTILES) -> Spread | None:
    """Of those that are not None; None if there are none."""
    ordered = sorted(value for value in values if value is not None)
    if not ordered:
        return None
    mean = math.fsum(ordered) / len(ordered)
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in ordered) / len(ordered))
    shares = tuple((share, percentile(ordered, share)) for share in percentiles)
    return Spread(len(ordered), mean, std, percentile(ordered, 50), shares, ordered[-1])


def peak_of(requests: Iterable[Measured]) -> int:
    """Most requests at once. One that ends when another is sent does not overlap with it."""
    changes = sorted([(each.sent.at, 1) for each in requests] + [(each.end, -1) for each in requests])
    running = peak = 0
    for _, change in changes:
        running += change
        peak = max(peak, running)
    return peak


def peak_output_of(requests: Iterable[Measured], start: float) -> float:
    seconds: Counter[int] = Counter()
    for each in requests:
        for time, tokens in each.arrivals:
            seconds[math.floor(time - start)] += tokens
    return float(max(seconds.values(), default=0))


def is_good(each: Measured, limits: Mapping[str, float]) -> bool:
    """A request of one token has no TPOT, and meets its limit; one without streaming has no TTFT, and is not good where one is asked."""
    if not each.streamed and limits.keys() & {"ttft", "tpot"}:
        return False
    values = {"ttft": each.ttft, "tpot": each.tpot or 0.0, "e2el": each.e2e}
    return all((value := values[name]) is not None and value <= limit for name, limit in limits.items())


def price_of(seconds: float, per_hour: float, ratio: float, input_tokens: int, output_tokens: int) -> Price | None:
    weight = input_tokens + ratio * output_tokens
    if not weight or not output_tokens:
        return None
    total = per_hour * seconds / 3600
    return Price(total, ratio, 1e6 * total / weight, 1e6 * total * ratio / weight, 1e6 * total / output_tokens)


def prompts_of(requests: Iterable[Measured]) -> PromptCounts | None:
    pairs = [each.prompt_tokens - each.meant for each in requests if each.prompt_tokens and each.meant is not None]
    if not pairs:
        return None
    return PromptCounts(len(pairs), sum(map(bool, pairs)), sum(pairs) / len(pairs), max(pairs, key=abs))


def categories_of(requests: Sequence[Measured], percentiles: Sequence[float]) -> tuple[CategoryFigures, ...]:
    made = []
    for name in sorted({each.category for each in requests} - {""}):
        members = [each for each in requests if each.category == name]
        known = [each for each in members if each.figures is not None]
        steps, proposed, accepted = (sum(getattr(each.figures, what) for each in known) for what in ("steps", "proposed", "accepted"))
        tokens = sum(each.output_tokens for each in known)
        made.append(
            CategoryFigures(
                name,
                len(members),
                sum(each.output_tokens for each in members),
                tokens / steps if steps else None,
                accepted / proposed if proposed else None,
                spread((each.tpot for each in members), percentiles),
            )
        )
    return tuple(made)


def failures_of(requests: Iterable[Measured]) -> tuple[tuple[str, int, str], ...]:
    failed = [each.failure for each in requests if each.failure is not None]
    reasons = Counter(each.reason for each in failed)
    return tuple((reason, count, next(each.detail for each in failed if each.reason == reason)) for reason, count in reasons.most_common())


def summarise(run: RawRun, options: SummaryOptions) -> Summary:
    good = [each for each in run.requests if each.failure is None]
    input_tokens, output_tokens = sum(each.prompt_tokens or 0 for each in good), sum(each.output_tokens for each in good)
    cached = [each.cached_tokens for each in good if each.cached_tokens is not None]
    sent = [each for each in run.requests if each.end > each.sent.at]

    def of(value: Callable[[Measured], float | None], among: Sequence[Measured] = good) -> Spread | None:
        return spread(map(value, among), options.percentiles)

    limits, price = options.goodput, options.price_per_hour
    return Summary(
        requests=len(run.requests),
        completed=len(good),
        seconds=run.seconds,
        failures=failures_of(run.requests),
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        cached_tokens=sum(cached) if cached else None,
        ttft=of(lambda each: each.ttft),
        tpot=of(lambda each: each.tpot),
        itl=spread((gap for each in good for gap in each.gaps), options.percentiles),
        e2e=of(lambda each: each.e2e),
        from_planned=of(lambda each: each.from_planned) if options.open_loop else None,
        lateness=of(lambda each: each.sent.lateness, sent) if options.open_loop else None,
        slot_wait=of(lambda each: each.sent.slot_wait, sent),
        per_user=of(lambda each: 1 / each.tpot if each.tpot else None),
        peak_concurrency=peak_of(sent),
        peak_output=peak_output_of(good, run.start),
        goodput=None if limits is None or not run.seconds else sum(is_good(each, limits) for each in good) / run.seconds,
        price=None if price is None else price_of(run.seconds, price, options.output_price_ratio, input_tokens, output_tokens),
        prompts=prompts_of(good),
        short=sum(each.asked is not None and each.output_tokens < each.asked for each in good),
        counted_by=tuple(Counter(each.counted_by for each in good).most_common()),
        categories=categories_of(good, options.percentiles),
        client_load=run.client_cpu / run.seconds if run.seconds else 0.0,
    )
