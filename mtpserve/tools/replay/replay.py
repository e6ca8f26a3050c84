"""A recording of steps, run again on the same model and sizes: does each step give what it gave?"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from mtpserve.config import EngineConfig
from mtpserve.config.spec import NONE
from mtpserve.core.errors import LoadError
from mtpserve.core.plan import SpanResult, StepPlan, StepResult
from mtpserve.core.protocols.runner import Launched, ModelRunner
from mtpserve.core.request import TokenLogprob
from mtpserve.engine.startup.build import build_engine
from mtpserve.engine.startup.draft_model import drafts_itself
from mtpserve.engine.startup.planning import describe, plan
from mtpserve.engine.startup.recording import Header, Recording, StepPlanned, StepRaised, StepRead, header_of

# between log-probabilities that count as the same: threads and hardware change their last digits
CLOSE = 0.01
# parts of a result that are compared within CLOSE; everything else must be equal
SCORES = ("logprobs", "prompt_logprobs")
FREE = ("config", "seeds")  # parts of a header that need not agree


@dataclass(slots=True)
class Replayed:
    steps: int = 0
    requests: int = 0
    tokens: int = 0
    raised: int = 0  # steps that raised, when they were recorded and now
    unread: int = 0  # steps whose results were never read
    truncated: bool = False
    difference: str | None = None  # the first; nothing after it was run


@dataclass(slots=True)
class Pending:
    """A step that was launched and not read."""

    plan: StepPlan
    names: dict[int, str]  # names of the requests, by seat
    launched: Launched | None
    error: Exception | None = None

    def result(self) -> StepResult | None:
        """The step's result; None: it raises, or has raised."""
        if self.launched is None:
            return None
        try:
            return self.launched.result()
        except Exception as error:
            self.error = error
            return None


def config_of(header: Header, model: str | None) -> EngineConfig:
    """The configuration whose sizes are those that were recorded; `model`: another place of the same
    checkpoint."""
    config = header.config
    return replace(
        config,
        # an older version, in which nobody else drafted, wrote it
        spec=config.spec if config.spec.named else config.spec.drafting_with(NONE),
        model=replace(
            config.model,
            model=model or config.model.model,
            device=header.device,
            dtype=header.dtype,
            context_length=header.context,
        ),
        cache=replace(
            config.cache,
            max_total_tokens=header.pages * header.page_size,
            mem_fraction_static=None,
            kv_events_config=None,
        ),
        scheduler=replace(config.scheduler, max_running_requests=header.seats, record_steps=None),
    )


def check_same(header: Header, config: EngineConfig) -> None:
    """Raises LoadError for a model or a machine on which the plans would mean something else."""
    model = describe(config, want_mtp=drafts_itself(config.spec)).arch.summary
    if model != header.model:
        raise LoadError(f"{config.model.model}: is {model}; the steps were recorded with {header.model}")
    now = header_of(config, plan(config))
    for name in Header.__struct_fields__:
        recorded, here = getattr(header, name), getattr(now, name)
        if name not in FREE and recorded != here:
            raise LoadError(
                f"{config.model.model}: the steps were recorded with {name.replace('_', ' ')} "
                f"{recorded}, here it is {here}"
            )


def replay(recording: Recording, config: EngineConfig, *, progress: bool = False) -> Replayed:
    """`config` is `config_of` the recording's header. Raises LoadError and ConfigError."""
    check_same(recording.header, config)
    return run(recording, build_engine(config, progress=progress).runner)


def run(recording: Recording, runner: ModelRunner) -> Replayed:
    replayer = Replay(runner)
    for event in recording.events():
        match event:
            case StepPlanned(step, planned):
                replayer.launch(step, planned)
            case StepRead(step, result):
                replayer.compare(step, result)
            case StepRaised():
                replayer.compare_failure(event)
        if replayer.outcome.difference is not None:
            return replayer.outcome
    replayer.outcome.unread, replayer.outcome.truncated = len(replayer.pending), recording.truncated
    for number, pending in replayer.pending.items():
        if pending.result() is None:
            replayer.outcome.difference = (
                f"step {number}, which was not read when it was recorded, raises {kind(pending.error)}"
            )
            break
    return replayer.outcome


@dataclass(slots=True)
class Replay:
    runner: ModelRunner
    outcome: Replayed = field(default_factory=Replayed)
    names: dict[int, str] = field(default_factory=dict)
    pending: dict[int, Pending] = field(default_factory=dict)

    def launch(self, number: int, plan: StepPlan) -> None:
        self.names |= {new_request.req_idx: new_request.id for new_request in plan.new_requests}
        self.outcome.steps += 1
        self.outcome.requests += sum(not new_request.output_ids for new_request in plan.new_requests)
        names = {span.req_idx: self.names.get(span.req_idx, "unknown") for span in plan.spans}
        try:
            self.pending[number] = Pending(plan, names, self.runner.launch(plan))
        except Exception as error:
            self.pending[number] = Pending(plan, names, None, error)

    def compare(self, number: int, recorded: StepResult) -> None:
        step = self.pending.pop(number)
        now = step.result()
        if now is None:
            self.outcome.difference = (
                f"step {number} raises {kind(step.error)}; when it was recorded it gave a result"
            )
            return
        for span, before, after in zip(step.plan.spans, recorded.spans, now.spans, strict=True):
            self.outcome.tokens += len(after.tokens)
            what = difference(before, after)
            if what is not None and self.outcome.difference is None:
                self.outcome.difference = (
                    f"step {number}, request {step.names[span.req_idx]} in seat {span.req_idx}: {what}"
                )

    def compare_failure(self, recorded: StepRaised) -> None:
        step = self.pending.pop(recorded.step)
        now = step.result()
        if now is not None:
            raised = f"raised {recorded.error} ({recorded.text}) when it was recorded"
            self.outcome.difference = f"step {recorded.step} {raised}, and gives a result now"
        elif type(step.error).__name__ != recorded.error:
            raised = f"raised {recorded.error} when it was recorded"
            self.outcome.difference = f"step {recorded.step} {raised}, and raises {kind(step.error)} now"
        self.outcome.raised += 1


def difference(recorded: SpanResult, now: SpanResult) -> str | None:
    """Describes the first difference in words; None if there is none."""
    for name in (
        "error",
        *(field_name for field_name in SpanResult.__struct_fields__ if field_name not in (*SCORES, "error")),
    ):
        before, after = getattr(recorded, name), getattr(now, name)
        if before != after:
            return f"{name} were {before} when it was recorded, and are {after} now"
    for name in SCORES:
        before, after = getattr(recorded, name), getattr(now, name)
        if not close(before, after):
            return f"the {name} differ by more than {CLOSE}"
    return None


def close(recorded: list[TokenLogprob] | None, now: list[TokenLogprob] | None) -> bool:
    if recorded is None or now is None:
        return recorded is now
    pairs = zip(recorded, now, strict=False)
    return len(recorded) == len(now) and all(
        a.logprob == b.logprob or abs(a.logprob - b.logprob) <= CLOSE for a, b in pairs
    )


def kind(error: Exception | None) -> str:
    return f"{type(error).__name__} ({error})"
