"""`mtpserve bench eval`: an exam from local files, asked twice, compared answer by answer. Exit code 1 if
more answers differ than allowed.

The second time the same server, or the same model in this process, decodes plainly; or another server is
asked, or the answers of an earlier run are read from a file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mtpserve.cli.options import Values, add_options, parsed_values, settings
from mtpserve.cli.parser import Parser
from mtpserve.config import ENGINE_SECTIONS
from mtpserve.config.options import check
from mtpserve.core.errors import ConfigError, RequestFailed
from mtpserve.core.sampling import SamplingParams
from mtpserve.spec.plain import HOW, PLAIN_FIELDS, looks_ahead, plainly
from mtpserve.tools.bench.eval.exam_client import ExamServer
from mtpserve.tools.bench.eval.parity import (
    Difference,
    ExamSide,
    answers,
    differences,
    read_report,
    report,
    write_report,
)
from mtpserve.tools.bench.eval.tasks import STOP, STRICT, Exam, ExamQuestion, gsm8k, mmlu

if TYPE_CHECKING:
    from mtpserve.llm import LLM
    from mtpserve.text.outputs import Completion

SHOWN, WIDTH = 20, 60  # differences, and characters of each text, in the terminal


def parser() -> Parser:
    arg_parser = Parser(
        prog="mtpserve bench eval",
        usage="%(prog)s --task mmlu|gsm8k --data FILE (--base-url URL | --model MODEL) [options]",
        description=(
            "Score a model on questions from local files, and compare its answers with those without "
            "drafts, of another server or of an earlier run."
        ),
    )
    exam = arg_parser.add_argument_group("the exam")
    exam.add_argument(
        "--task",
        choices=("mmlu", "gsm8k"),
        required=True,
        help="mmlu: multiple choice, by log-probabilities; gsm8k: generated texts",
    )
    exam.add_argument(
        "--data",
        metavar="FILE",
        required=True,
        help="file with the questions: CSV or JSONL for mmlu, JSONL for gsm8k",
    )
    exam.add_argument(
        "--dev",
        metavar="FILE",
        help="file with example questions and answers at the start of every prompt, in the same format",
    )
    exam.add_argument(
        "--shots",
        metavar="N",
        type=int,
        help="number of example questions in a prompt (default: 5 with --dev)",
    )
    exam.add_argument("--limit", metavar="N", type=int, help="ask only the first N questions")
    exam.add_argument(
        "--subject",
        metavar="TEXT",
        help="subject of mmlu's questions (default: from the file's name, or from its lines)",
    )
    exam.add_argument(
        "--regex",
        metavar="REGEX",
        default=STRICT,
        help=f"regular expression whose first group is the answer in a text (default: {STRICT})",
    )
    exam.add_argument(
        "--last-match", action="store_true", help="use the last match of the expression, not the first"
    )
    exam.add_argument(
        "--max-tokens", metavar="N", type=int, default=256, help="maximum tokens of a text (default: 256)"
    )
    add_sides(arg_parser)
    arg_parser.add_argument(
        "--tolerance", metavar="N", type=int, default=0, help="number of answers that may differ (default: 0)"
    )
    arg_parser.add_argument("--output-file", metavar="FILE", help="file for all answers, as JSON")
    add_options(arg_parser, ENGINE_SECTIONS)
    return arg_parser


def add_sides(arg_parser: Parser) -> None:
    sides = arg_parser.add_argument_group("who answers; without --base-url, --model runs in this process")
    sides.add_argument(
        "--base-url",
        metavar="URL",
        help="URL of a server with OpenAI's API; --model is then the model's name on that server",
    )
    sides.add_argument(
        "--api-key",
        dest="bearer",
        metavar="KEY",
        help="API key, sent as a bearer token (default: OPENAI_API_KEY)",
    )
    sides.add_argument("--chat", action="store_true", help="use the chat completions API for texts")
    sides.add_argument(
        "--concurrency",
        metavar="N",
        type=int,
        default=16,
        help="maximum number of requests at once (default: 16)",
    )
    sides.add_argument("--other-url", metavar="URL", help="URL of a server to compare with")
    sides.add_argument("--against", metavar="FILE", help="file of an earlier --output-file, to compare with")


def run(arguments: Sequence[str]) -> int:
    args = parser().parse(arguments)
    for name in ("limit", "max_tokens", "concurrency"):
        check((value := getattr(args, name)) is None or value >= 1, name, value, "at least 1")
    for name in ("shots", "tolerance"):
        check((value := getattr(args, name)) is None or value >= 0, name, value, "at least 0")
    values = parsed_values(args)
    if args.base_url is None and "model" not in values:
        raise ConfigError("give --base-url, a server, or --model, which runs in this process")
    exam = exam_of(args)
    former = read_report(args.against).sides[0] if args.against is not None else None
    sides = (
        from_server(args, values, exam, former)
        if args.base_url is not None
        else from_model(args, values, exam, former)
    )
    differing = differences(*sides) if len(sides) > 1 else []
    exam_report = report(exam, sides, differing)
    show(exam, sides, differing, exam_report.differing_texts)
    if args.output_file is not None:
        write_report(args.output_file, exam_report)
    return int(len(differing) > args.tolerance)


def exam_of(args: Any) -> Exam:
    shots = args.shots if args.shots is not None else 5 if args.dev is not None else 0
    if args.task == "mmlu":
        questions = mmlu(args.data, args.dev, shots, args.subject)
    else:
        questions = gsm8k(args.data, args.dev, shots)
    if not questions:
        raise ConfigError(f"--data {args.data}: no question in it")
    try:
        re.compile(args.regex)
    except re.error as error:
        raise ConfigError(f"--regex {args.regex!r}: {error}") from error
    return Exam(args.task, questions[: args.limit], shots, args.regex, args.last_match, args.max_tokens, STOP)


def from_server(args: Any, values: Values, exam: Exam, former: ExamSide | None) -> list[ExamSide]:
    if others := sorted({*values} - {"model"}):
        raise ConfigError(f"--{others[0].replace('_', '-')} is for --model without --base-url")
    key = args.bearer or os.environ.get("OPENAI_API_KEY")

    def server(url: str) -> tuple[ExamServer, bool]:
        at = ExamServer(url.rstrip("/").removesuffix("/v1"), "", key, args.chat, args.concurrency)
        listed = at.listed()
        name = values.get("model") or (listed[0].id if listed else "")
        ahead = any(looks_ahead(model) for model in listed if model.id == name)
        return replace(at, model=str(name)), ahead

    ours, ahead = server(args.base_url)
    first = answers(args.base_url, ours, exam)
    if former is not None:
        return [first, former]
    if args.other_url is not None:
        return [first, answers(args.other_url, server(args.other_url)[0], exam)]
    return [first, answers("plain", replace(ours, body=PLAIN_FIELDS), exam)] if ahead else [first]


def from_model(args: Any, values: Values, exam: Exam, former: ExamSide | None) -> list[ExamSide]:
    if args.other_url is not None or args.chat:
        raise ConfigError("--other-url and --chat are for --base-url")
    settings(values)  # what the options rule out is said before anything loads
    from mtpserve.llm import LLM

    options: dict[str, Any] = dict(values)
    with LLM(**options) as llm:
        first = answers(str(values["model"]), ModelAsker(llm), exam)
        if former is not None:
            return [first, former]
        if not looks_ahead(llm.engine.card):
            return [first]
        llm.reset_prefix_cache()
        return [first, answers("plain", ModelAsker(llm, plainly), exam)]


@dataclass(frozen=True, slots=True)
class ModelAsker:
    """bench.parity.Asker: a model in this process."""

    llm: LLM
    params: Callable[[SamplingParams], SamplingParams] = lambda params: params

    def scores(self, questions: Sequence[ExamQuestion]) -> list[list[float]]:
        encode = self.llm.tokenizer.encode
        pairs = [
            (encode(question.prompt + option), len(encode(question.prompt)))
            for question in questions
            for option in question.options
        ]
        completions = self._run(
            [ids for ids, _ in pairs], SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
        )
        # The first token has no score.
        sums = iter(
            sum(score.logprob for score in (one.prompt_logprobs or [])[size - 1 :])
            for one, (_, size) in zip(completions, pairs, strict=True)
        )
        return [[next(sums) for _ in question.options] for question in questions]

    def texts(self, questions: Sequence[ExamQuestion], exam: Exam) -> list[str]:
        params = SamplingParams(max_tokens=exam.max_tokens, temperature=0, stop=exam.stop)
        return [
            completion.text
            for completion in self._run([self.llm.tokenizer.encode(one.prompt) for one in questions], params)
        ]

    def _run(self, prompts: list[list[int]], params: SamplingParams) -> list[Completion]:
        completions = self.llm.generate(prompts, self.params(params))
        if failed := next((completion for completion in completions if completion.error is not None), None):
            raise RequestFailed(failed.error or "a request failed")
        return completions


def show(exam: Exam, sides: Sequence[ExamSide], differing: Sequence[Difference], texts: int) -> None:
    print(f"{exam.task}, {len(exam.questions)} questions, {exam.shots} shots")
    for side in sides:
        print(f"score       {side.score:.4f}  {side.name}")
    if len(sides) == 1:
        print(
            f"compared    with nothing: {HOW} launches or runs a model of which plain decoding is "
            f"compared; or --other-url, --against"
        )
        return
    same = len(exam.questions) - len(differing)
    beside = f"; {texts} of the texts differ" if not exam.questions[0].options else ""
    print(
        f"compared    {same} of {len(exam.questions)} answers are the same, {len(differing)} differ{beside}"
    )
    for difference in differing[:SHOWN]:
        gap = "" if difference.gap is None else f", the best two {difference.gap:.2g} apart"
        print(
            f"            {difference.ours.name}: {short(difference.ours.compared)}, "
            f"{sides[1].name}: {short(difference.other.compared)}, right: {difference.ours.expected}{gap}"
        )
    if len(differing) > SHOWN:
        print(f"            and {len(differing) - SHOWN} more: --output-file has all answers")


def short(text: str) -> str:
    shown = " ".join(text.split())
    return repr(shown if len(shown) <= WIDTH else shown[:WIDTH] + "…")
