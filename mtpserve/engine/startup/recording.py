"""`--record-steps`: each plan as it is launched and each result as it is read, in a file that `mtpserve
replay` runs again.

    magic | Preamble | Header | StepPlanned 1 | StepPlanned 2 | StepRead 1 | StepPlanned 3 | StepRaised 2 | …

The parts come in the order in which things happened.

Each part is msgpack after its length (4 bytes, big-endian), and flushed: what was written is there after a
crash.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Literal, TypeVar

import msgspec

from mtpserve import __version__
from mtpserve.config import EngineConfig
from mtpserve.core.errors import ConfigError, LoadError
from mtpserve.core.plan import StepPlan, StepResult
from mtpserve.core.protocols.runner import Launched, ModelRunner
from mtpserve.engine.startup.planning import Plan, overlap_of

T = TypeVar("T")

MAGIC = b"mtpserve steps\n"
FORMAT = 4


class Preamble(msgspec.Struct, frozen=True, array_like=True):
    """Any version can read this part of any other's file."""

    format: int
    version: str  # mtpserve's version


class Header(msgspec.Struct, frozen=True):
    """The engine that was recorded: its configuration, and what was resolved from it, the model and the
    machine."""

    config: EngineConfig
    model: str  # the architecture in a line
    device: str
    dtype: str
    overlap: int  # steps in flight
    pages: int
    page_size: int
    seats: int
    context: int
    eos_ids: tuple[int, ...]
    seeds: str  # where the seeds of requests without one came from; each admission has its own


class StepPlanned(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Written before the step is launched."""

    step: int
    plan: StepPlan


class StepRead(msgspec.Struct, frozen=True, tag=True, array_like=True):
    step: int
    result: StepResult


class StepRaised(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The step raised, when it was launched or when its result was read."""

    step: int
    when: Literal["launched", "read"]
    error: str  # the exception's class
    text: str


Event = StepPlanned | StepRead | StepRaised


def header_of(config: EngineConfig, engine_plan: Plan) -> Header:
    arch, memory, seed = engine_plan.described.arch, engine_plan.memory, config.scheduler.random_seed
    return Header(
        config, arch.summary, engine_plan.device.type, str(engine_plan.dtype).removeprefix("torch."),
        overlap_of(config, engine_plan.device),
        memory.pages[0], engine_plan.config.cache.page_size, memory.max_running, memory.context_length,
        arch.eos_ids,
        "the system" if seed is None else f"--random-seed {seed}",
    )  # fmt: skip


class StepRecorder:
    """core.protocols.ModelRunner that writes down what another one is given and gives."""

    def __init__(self, runner: ModelRunner, file: BinaryIO) -> None:
        self.runner, self.file, self.steps = runner, file, 0
        self.sizes, self.processors = runner.sizes, runner.processors

    def write(self, item: Preamble | Header | Event) -> None:
        data = msgspec.msgpack.encode(item)
        self.file.write(len(data).to_bytes(4, "big") + data)
        self.file.flush()

    def reshape(self, shape: object) -> None:
        raise ConfigError(
            "--record-steps must be left out where the shape of steps changes: such changes are not recorded"
        )

    def check(self) -> None:
        self.runner.check()

    def close(self) -> None:
        self.runner.close()
        self.file.close()

    def launch(self, plan: StepPlan) -> Launched:
        self.steps += 1
        self.write(StepPlanned(self.steps, plan))
        try:
            return RecordedStep(self, self.steps, self.runner.launch(plan))
        except Exception as error:
            self.write(StepRaised(self.steps, "launched", type(error).__name__, str(error)))
            raise


class RecordedStep:
    """core.protocols.Launched."""

    def __init__(self, recorder: StepRecorder, step: int, launched: Launched) -> None:
        self.recorder, self.step, self.launched, self.ended = recorder, step, launched, launched.ended

    def result(self) -> StepResult:
        try:
            result = self.launched.result()
        except Exception as error:
            self.recorder.write(StepRaised(self.step, "read", type(error).__name__, str(error)))
            raise
        self.recorder.write(StepRead(self.step, result))
        return result


def recorder_of(path: str, header: Header, runner: ModelRunner) -> StepRecorder:
    """Raises ConfigError for a file that cannot be written."""
    try:
        # Open as long as the engine lives.
        file = open(path, "wb")  # noqa: SIM115
        file.write(MAGIC)
    except OSError as error:
        raise ConfigError(f"--record-steps {path}: {error.strerror}") from error
    recorder = StepRecorder(runner, file)
    recorder.write(Preamble(FORMAT, __version__))
    recorder.write(header)
    return recorder


class Recording:
    """A file that was recorded. Raises LoadError for one that is not, or that another version wrote."""

    def __init__(self, path: str | Path) -> None:
        self.path, self.truncated = path, False
        try:
            self._data = Path(path).read_bytes()
        except OSError as error:
            raise LoadError(f"{path}: {error.strerror}") from error
        if not self._data.startswith(MAGIC):
            raise LoadError(f"{path}: was not written by --record-steps")
        parts = self._parts()
        self.head = self._decoded(next(parts, None), Preamble)
        if self.head.format != FORMAT:
            wrote = f"was written by mtpserve {self.head.version} in format {self.head.format}"
            raise LoadError(f"{path}: {wrote}; mtpserve {__version__} reads format {FORMAT}")
        self.header = self._decoded(next(parts, None), Header)
        self._rest = parts

    def events(self) -> Iterator[Event]:
        """Yields the events once, in order. `truncated` is known afterwards. Raises LoadError for a damaged
        part."""
        decoder = msgspec.msgpack.Decoder(Event)
        for start, payload in self._rest:
            try:
                yield decoder.decode(payload)
            except (msgspec.DecodeError, ValueError) as error:
                raise LoadError(f"{self.path}: is damaged at byte {start}: {one_line(error)}") from error

    def _parts(self) -> Iterator[tuple[int, bytes]]:
        """Yields each part with the place where it starts."""
        at = len(MAGIC)
        while at < len(self._data):
            start = at + 4
            at = start + int.from_bytes(self._data[at:start], "big")
            if at > len(self._data):
                self.truncated = True
                return
            yield start, self._data[start:at]

    def _decoded(self, frame: tuple[int, bytes] | None, kind: type[T]) -> T:
        if frame is None:
            raise LoadError(f"{self.path}: ends before the first step")
        try:
            return msgspec.msgpack.decode(frame[1], type=kind)
        except (msgspec.DecodeError, ValueError, ConfigError) as error:
            raise LoadError(f"{self.path}: is damaged at byte {frame[0]}: {one_line(error)}") from error


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
