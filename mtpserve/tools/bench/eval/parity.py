"""An exam's answers from one side or two, and where they differ. Who answers is an `Asker`: a server
(exam_client.py), or a model in this process (tools/bench/eval/bench_eval.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from mtpserve.core.errors import ConfigError
from mtpserve.tools.bench.eval.tasks import LETTERS, Exam, ExamQuestion


class Asker(Protocol):
    def scores(self, questions: Sequence[ExamQuestion]) -> list[list[float]]:
        """Returns for each question its options' log-probabilities after the prompt, each the sum of its
        tokens'."""
        ...

    def texts(self, questions: Sequence[ExamQuestion], exam: Exam) -> list[str]:
        """The greedy continuations, up to a stop string or the longest that is allowed."""
        ...


class ExamAnswer(msgspec.Struct, frozen=True):
    """`found`: what is compared with the right answer: a letter, or what the text says; None if it says
    nothing."""

    name: str
    found: str | None
    expected: str
    text: str = ""
    scores: list[float] = []

    @property
    def right(self) -> bool:
        return self.found == self.expected

    @property
    def compared(self) -> str:
        """A text in which nothing was found is compared as a whole."""
        return self.text if self.found is None else self.found


class ExamSide(msgspec.Struct, frozen=True):
    name: str
    answers: list[ExamAnswer]

    @property
    def score(self) -> float:
        return sum(answer.right for answer in self.answers) / len(self.answers)


class ExamReport(msgspec.Struct, frozen=True):
    """What is written to a file: the first side is that which is tested."""

    task: str
    shots: int
    sides: list[ExamSide]
    scores: list[float]
    differing: list[str]  # names of questions
    differing_texts: int


@dataclass(frozen=True, slots=True)
class Difference:
    ours: ExamAnswer
    other: ExamAnswer

    @property
    def gap(self) -> float | None:
        """How far apart the two best options are on the first side: near 0 it is a tie within rounding. None
        for texts."""
        best = sorted(self.ours.scores, reverse=True)
        return best[0] - best[1] if len(best) > 1 else None


def answers(name: str, asker: Asker, exam: Exam) -> ExamSide:
    """An exam has questions of one kind."""
    if not exam.questions[0].options:
        texts = asker.texts(exam.questions, exam)
        exam_answers = [
            ExamAnswer(q.name, exam.answer(text), q.expected, text)
            for q, text in zip(exam.questions, texts, strict=True)
        ]
    else:
        scored = asker.scores(exam.questions)
        exam_answers = [
            ExamAnswer(q.name, LETTERS[scores.index(max(scores))], q.expected, scores=scores)
            for q, scores in zip(exam.questions, scored, strict=True)
        ]
    return ExamSide(name, exam_answers)


def differences(ours: ExamSide, other: ExamSide) -> list[Difference]:
    """Raises ConfigError unless both have answered the same questions."""
    named = [[(answer.name, answer.expected) for answer in side.answers] for side in (ours, other)]
    if named[0] != named[1]:
        raise ConfigError(f"{ours.name} and {other.name} have answered different questions")
    pairs = zip(ours.answers, other.answers, strict=True)
    return [Difference(one, two) for one, two in pairs if one.compared != two.compared]


def report(exam: Exam, sides: list[ExamSide], differing: Sequence[Difference]) -> ExamReport:
    texts = sum(one.text != two.text for one, two in zip(sides[0].answers, sides[-1].answers, strict=True))
    scores = [round(side.score, 6) for side in sides]
    return ExamReport(
        exam.task, exam.shots, sides, scores, [difference.ours.name for difference in differing], texts
    )


def read_report(file: str) -> ExamReport:
    try:
        return msgspec.json.decode(Path(file).read_bytes(), type=ExamReport)
    except OSError as error:
        raise ConfigError(f"--against {file}: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise ConfigError(f"--against {file}: is not what --output-file writes: {error}") from error


def write_report(file: str, exam_report: ExamReport) -> None:
    try:
        Path(file).write_bytes(msgspec.json.format(msgspec.json.encode(exam_report), indent=2) + b"\n")
    except OSError as error:
        raise ConfigError(f"--output-file {file}: {error.strerror}") from error
