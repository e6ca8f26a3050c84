"""Questions from files, as prompts, and what counts as a right answer: multiple choice in MMLU's format,
texts in GSM8K's.

    mmlu     question,A,B,C,D,letter                      a CSV file without a header
             {"question": text, "choices": [text, …], "answer": number or letter}   one object per line;
                                                          "subject" may be there
    gsm8k    {"question": text, "answer": "… #### 42"}    one object per line

Prompts are those of lm-evaluation-harness (tasks mmlu and gsm8k): so are the answers to the same questions,
and the scores. Errors are ConfigErrors that name the file and the line.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtpserve.core.errors import ConfigError

LETTERS = "ABCDEFGHIJ"
STRICT = r"#### (\-?[0-9\.\,]+)"  # what GSM8K's few-shot answers end with
STOP = ("Question:", "</s>", "<|im_end|>")
LEFT_OUT = re.compile(r",|\$|(?s:.*)#### |\.$")  # of numbers before they are compared
SPLITS = re.compile(r"_(test|val|dev)$")


@dataclass(frozen=True, slots=True)
class ExamQuestion:
    """One question as it is asked. With `options` each of them is scored after the prompt, and the best is
    the answer, as its letter; without, the prompt is continued. `expected`: the right letter, or the right
    answer's text."""

    name: str
    prompt: str
    options: tuple[str, ...]
    expected: str


@dataclass(frozen=True, slots=True)
class Exam:
    """`pattern`: what the answer is in a text, its first group or the whole; `last`: the last one of several
    matches."""

    task: str
    questions: tuple[ExamQuestion, ...]
    shots: int
    pattern: str = STRICT
    last: bool = False
    max_tokens: int = 256
    stop: tuple[str, ...] = STOP

    def answer(self, text: str) -> str | None:
        """The answer in a text that was generated, as it is compared; None if there is none."""
        matches = list(re.finditer(self.pattern, text))
        if not matches:
            return None
        hit = matches[-1 if self.last else 0]
        return plain_number(hit[1] if hit.re.groups and hit[1] is not None else hit[0])


@dataclass(frozen=True, slots=True)
class MultipleChoice:
    where: str
    question: str
    choices: tuple[str, ...]
    answer: int
    subject: str

    @property
    def prompt(self) -> str:
        lines = [f"{letter}. {choice}" for letter, choice in zip(LETTERS, self.choices, strict=False)]
        return "\n".join([self.question.strip(), *lines, "Answer:"])

    @property
    def answered(self) -> str:
        return f"{self.prompt} {LETTERS[self.answer]}"


@dataclass(frozen=True, slots=True)
class Problem:
    where: str
    question: str
    answer: str

    @property
    def prompt(self) -> str:
        return f"Question: {self.question}\nAnswer:"

    @property
    def answered(self) -> str:
        return f"{self.prompt} {self.answer}"


def mmlu(file: str, dev: str | None, shots: int, subject: str | None) -> tuple[ExamQuestion, ...]:
    """Every question after the first `shots` of its subject in `dev`. `subject`: of the files, instead of
    what their names say."""
    examples = choices_of(dev, subject) if dev is not None else []
    questions = []
    for question in choices_of(file, subject):
        shown = [
            one.answered for one in examples if question.subject in ("", one.subject) or not one.subject
        ][:shots]
        if len(shown) < shots:
            raise ConfigError(
                f"--shots {shots}: {dev or 'no --dev'} has {len(shown)} questions about "
                f"{question.subject or 'it'}"
            )
        about = f" about {question.subject.replace('_', ' ')}" if question.subject else ""
        front = f"The following are multiple choice questions (with answers){about}.\n\n"
        options = tuple(f" {letter}" for letter in LETTERS[: len(question.choices)])
        questions.append(
            ExamQuestion(
                Path(question.where).name,
                front + "\n\n".join([*shown, question.prompt]),
                options,
                LETTERS[question.answer],
            )
        )
    return tuple(questions)


def gsm8k(file: str, dev: str | None, shots: int) -> tuple[ExamQuestion, ...]:
    shown = [problem.answered for problem in problems_of(dev)][:shots] if dev is not None else []
    if len(shown) < shots:
        raise ConfigError(f"--shots {shots}: {dev or 'no --dev'} has {len(shown)} questions")
    return tuple(
        ExamQuestion(
            Path(problem.where).name,
            "\n\n".join([*shown, problem.prompt]),
            (),
            plain_number(problem.answer.split("####")[-1].strip()),
        )
        for problem in problems_of(file)
    )


def plain_number(text: str) -> str:
    return LEFT_OUT.sub("", text.strip()).strip().lower()


def choices_of(file: str, subject: str | None) -> list[MultipleChoice]:
    about = (
        subject
        if subject is not None
        else SPLITS.sub("", Path(file).stem)
        if SPLITS.search(Path(file).stem)
        else ""
    )
    if file.lower().endswith(".csv"):
        rows = csv.reader(contents(file).splitlines(keepends=True))
        return [
            choice_of(f"{file}:{i}", row[0], row[1:-1], row[-1], about)
            for i, row in enumerate(whole_rows(rows, file), 1)
        ]
    questions = []
    for where, value in objects(file):
        choices = value.get("choices")
        if not isinstance(choices, list):
            raise ConfigError(f"{where}: choices must be a list of texts, got {choices!r}")
        question_subject = value.get("subject") if subject is None else subject
        questions.append(
            choice_of(
                where,
                value.get("question"),
                choices,
                value.get("answer"),
                question_subject if isinstance(question_subject, str) else about,
            )
        )
    return questions


def whole_rows(rows: Iterator[list[str]], file: str) -> Iterator[list[str]]:
    for i, row in enumerate((row for row in rows if row), 1):
        if len(row) < 4:
            raise ConfigError(
                f"{file}:{i}: must be a question, at least two choices and a letter, got {len(row)} fields"
            )
        yield row


def choice_of(where: str, question: Any, choices: Sequence[Any], answer: Any, subject: str) -> MultipleChoice:
    if not isinstance(question, str) or not all(isinstance(choice, str) for choice in choices):
        raise ConfigError(f"{where}: question and choices must be texts")
    if not 2 <= len(choices) <= len(LETTERS):
        raise ConfigError(f"{where}: there must be 2 to {len(LETTERS)} choices, got {len(choices)}")
    letters = LETTERS[: len(choices)]
    number = letters.find(answer.strip()) if isinstance(answer, str) and len(answer.strip()) == 1 else answer
    if type(number) is not int or not 0 <= number < len(choices):
        raise ConfigError(
            f"{where}: answer must be one of {', '.join(letters)}, or a number below "
            f"{len(choices)}, got {answer!r}"
        )
    return MultipleChoice(where, question, tuple(choices), number, subject)


def problems_of(file: str) -> list[Problem]:
    problems = []
    for where, value in objects(file):
        question, answer = value.get("question"), value.get("answer")
        if not isinstance(question, str) or not isinstance(answer, str):
            raise ConfigError(f"{where}: question and answer must be texts")
        problems.append(Problem(where, question, answer))
    return problems


def objects(file: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the place and the object of each line that is not empty. Raises ConfigError."""
    for number, line in enumerate(contents(file).splitlines(), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{file}:{number}: is not JSON: {error}") from error
        if not isinstance(value, dict):
            raise ConfigError(f"{file}:{number}: must be an object, got {type(value).__name__}")
        yield f"{file}:{number}", value


def contents(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: {getattr(error, 'strerror', None) or error}") from error
