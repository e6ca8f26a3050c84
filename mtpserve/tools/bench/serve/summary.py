"""A run's figures. docs/bench.md defines each of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from mtpserve.config.options import check
from mtpserve.tools.bench.serve.measured import Measured
from mtpserve.tools.bench.serve.run import RawRun

PERCENTILES = (90.0, 95.0, 99.0)
LATE = 0.010  # seconds; a p99 of lateness above it is a warning
BUSY = 0.9  # a share of one core; above it the client's own times are in doubt


@dataclass(frozen=True, slots=True)
class Spread:
    """The distribution of some values, in their unit."""

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
    rank = (len(ordered) - 1) * share / 100
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def spread(values: Iterable[float | None], percentiles: Sequence[float] = PERCENTILES) -> Spread | None:
    """Returns the distribution of the values that are not None; None if there are none."""
    ordered = sorted(value for value in values if value is not None)
    if not ordered:
        return None
    mean = math.fsum(ordered) / len(ordered)
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in ordered) / len(ordered))
    shares = tuple((share, percentile(ordered, share)) for share in percentiles)
    return Spread(len(ordered), mean, std, percentile(ordered, 50), shares, ordered[-1])


def peak_of(requests: Iterable[Measured]) -> int:
    """Returns the most requests at once. A request that ends when another is sent does not overlap with
    it."""
    changes = sorted(
        [(request.sent.at, 1) for request in requests] + [(request.end, -1) for request in requests]
    )
    running = peak = 0
    for _, change in changes:
        running += change
        peak = max(peak, running)
    return peak


def peak_output_of(requests: Iterable[Measured], start: float) -> float:
    seconds: Counter[int] = Counter()
    for request in requests:
        for time, tokens in request.arrivals:
            seconds[math.floor(time - start)] += tokens
    return float(max(seconds.values(), default=0))


def is_good(request: Measured, limits: Mapping[str, float]) -> bool:
    """A request of one token has no TPOT, and meets its limit; one without streaming has no TTFT, and is not
    good where one is asked."""
    if not request.streamed and limits.keys() & {"ttft", "tpot"}:
        return False
    values = {"ttft": request.ttft, "tpot": request.tpot or 0.0, "e2el": request.e2e}
    return all((value := values[name]) is not None and value <= limit for name, limit in limits.items())


def price_of(
    seconds: float, per_hour: float, ratio: float, input_tokens: int, output_tokens: int
) -> Price | None:
    weight = input_tokens + ratio * output_tokens
    if not weight or not output_tokens:
        return None
    total = per_hour * seconds / 3600
    return Price(
        total, ratio, 1e6 * total / weight, 1e6 * total * ratio / weight, 1e6 * total / output_tokens
    )


def prompts_of(requests: Iterable[Measured]) -> PromptCounts | None:
    pairs = [
        request.prompt_tokens - request.meant
        for request in requests
        if request.prompt_tokens and request.meant is not None
    ]
    if not pairs:
        return None
    return PromptCounts(len(pairs), sum(map(bool, pairs)), sum(pairs) / len(pairs), max(pairs, key=abs))


def categories_of(requests: Sequence[Measured], percentiles: Sequence[float]) -> tuple[CategoryFigures, ...]:
    categories = []
    for name in sorted({request.category for request in requests} - {""}):
        members = [request for request in requests if request.category == name]
        with_figures = [request for request in members if request.figures is not None]
        steps, proposed, accepted = (
            sum(getattr(request.figures, what) for request in with_figures)
            for what in ("steps", "proposed", "accepted")
        )
        tokens = sum(request.output_tokens for request in with_figures)
        categories.append(
            CategoryFigures(
                name,
                len(members),
                sum(request.output_tokens for request in members),
                tokens / steps if steps else None,
                accepted / proposed if proposed else None,
                spread((request.tpot for request in members), percentiles),
            )
        )
    return tuple(categories)


def failures_of(requests: Iterable[Measured]) -> tuple[tuple[str, int, str], ...]:
    failed = [request.failure for request in requests if request.failure is not None]
    reasons = Counter(failure.reason for failure in failed)
    return tuple(
        (reason, count, next(failure.detail for failure in failed if failure.reason == reason))
        for reason, count in reasons.most_common()
    )


def summarise(run: RawRun, options: SummaryOptions) -> Summary:
    good = [request for request in run.requests if request.failure is None]
    input_tokens, output_tokens = (
        sum(request.prompt_tokens or 0 for request in good),
        sum(request.output_tokens for request in good),
    )
    cached = [request.cached_tokens for request in good if request.cached_tokens is not None]
    sent = [request for request in run.requests if request.end > request.sent.at]

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
        ttft=of(lambda request: request.ttft),
        tpot=of(lambda request: request.tpot),
        itl=spread((gap for request in good for gap in request.gaps), options.percentiles),
        e2e=of(lambda request: request.e2e),
        from_planned=of(lambda request: request.from_planned) if options.open_loop else None,
        lateness=of(lambda request: request.sent.lateness, sent) if options.open_loop else None,
        slot_wait=of(lambda request: request.sent.slot_wait, sent),
        per_user=of(lambda request: 1 / request.tpot if request.tpot else None),
        peak_concurrency=peak_of(sent),
        peak_output=peak_output_of(good, run.start),
        goodput=None
        if limits is None or not run.seconds
        else sum(is_good(request, limits) for request in good) / run.seconds,
        price=None
        if price is None
        else price_of(run.seconds, price, options.output_price_ratio, input_tokens, output_tokens),
        prompts=prompts_of(good),
        short=sum(
            request.max_tokens is not None and request.output_tokens < request.max_tokens for request in good
        ),
        counted_by=tuple(Counter(request.counted_by for request in good).most_common()),
        categories=categories_of(good, options.percentiles),
        client_load=run.client_cpu / run.seconds if run.seconds else 0.0,
    )


def percentiles_of(text: str) -> tuple[float, ...]:
    """Returns percentiles, in [0, 100]. Raises ConfigError."""
    try:
        percentiles = tuple(float(piece) for piece in text.split(","))
    except ValueError:
        percentiles = (-1.0,)
    check(
        all(0 <= percentile <= 100 for percentile in percentiles),
        "metric_percentiles",
        text,
        "numbers from 0 to 100 with commas between them",
    )
    return percentiles or PERCENTILES


def goodput_of(entries: Sequence[str]) -> dict[str, float]:
    """Returns the limit of each latency in seconds. Raises ConfigError."""
    limits = {}
    for entry in entries:
        name, _, value = entry.partition(":")
        try:
            limit = float(value)
        except ValueError:
            limit = -1.0
        check(
            name in ("ttft", "tpot", "e2el") and limit >= 0, "goodput", entry, "ttft:MS, tpot:MS or e2el:MS"
        )
        limits[name] = limit / 1000
    return limits
