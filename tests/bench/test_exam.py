"""`mtpserve bench eval`: questions from files, the bundled model and a scripted server that answer them, and the comparison."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from mtpserve.core.errors import ConfigError, RequestFailed
from mtpserve.tools.bench.eval.bench_eval import run
from mtpserve.tools.bench.eval.exam_client import ExamServer
from mtpserve.tools.bench.eval.parity import ExamAnswer, ExamSide, differences
from mtpserve.tools.bench.eval.tasks import Exam, gsm8k, mmlu

CSV = 'Which defines a function?,def,class,A\n\n"A list, of numbers?",{},"[1, 2]",B\n'
DEV = "Which defines a class?,def,class,B\n"
PROBLEMS = [{"question": "2 + 2?", "answer": "Two and two.\n#### 4"}, {"question": "Many?", "answer": "#### 1,000"}]


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "some_words_test.csv").write_text(CSV)
    (tmp_path / "some_words_dev.csv").write_text(DEV)
    (tmp_path / "g.jsonl").write_text("\n".join(map(json.dumps, PROBLEMS)))
    return tmp_path


def test_prompts_are_those_of_the_harness(files: Path) -> None:
    first, second = mmlu(str(files / "some_words_test.csv"), str(files / "some_words_dev.csv"), 1, None)
    front = "The following are multiple choice questions (with answers) about some words.\n\n"
    shot = "Which defines a class?\nA. def\nB. class\nAnswer: B\n\n"
    assert first.prompt == f"{front}{shot}Which defines a function?\nA. def\nB. class\nAnswer:"
    assert (first.options, first.expected, first.name) == ((" A", " B"), "A", "some_words_test.csv:1")
    assert second.prompt == f"{front}{shot}A list, of numbers?\nA. {{}}\nB. [1, 2]\nAnswer:"
    made = gsm8k(str(files / "g.jsonl"), str(files / "g.jsonl"), 1)
    assert made[1].prompt == "Question: 2 + 2?\nAnswer: Two and two.\n#### 4\n\nQuestion: Many?\nAnswer:"
    assert [each.expected for each in made] == ["4", "1000"]


def test_questions_as_objects_have_shots_of_their_own_subject(tmp_path: Path) -> None:
    lines = [{"question": "a?", "choices": ["x", "y", "z"], "answer": 2, "subject": "one"},
             {"question": "b?", "choices": ["x", "y"], "answer": "B", "subject": "two"}]  # fmt: skip
    file = tmp_path / "q.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    one, two = mmlu(str(file), str(file), 1, None)
    assert "about one.\n\na?" in one.prompt and "b?" not in one.prompt and one.expected == "C"
    assert "about two.\n\nb?" in two.prompt and "a?" not in two.prompt and two.expected == "B"
    assert mmlu(str(file), None, 0, "three")[0].prompt.startswith("The following are multiple choice questions (with answers) about three.")
    with pytest.raises(ConfigError, match=r"--shots 2: .*q\.jsonl has 1 questions about one"):
        mmlu(str(file), str(file), 2, None)


WRONG = {
    "a.csv:1: must be a question, at least two choices and a letter, got 2 fields": ("a.csv", "what?,A\n"),
    "a.csv:1: answer must be one of A, B, or a number below 2, got 'C'": ("a.csv", "what?,x,y,C\n"),
    "a.jsonl:2: is not JSON": ("a.jsonl", "\n{"),
    "a.jsonl:1: must be an object, got list": ("a.jsonl", "[]"),
    "a.jsonl:1: choices must be a list of texts, got 'x'": ("a.jsonl", '{"question": "q", "choices": "x"}'),
    "a.jsonl:1: question and choices must be texts": ("a.jsonl", '{"question": "q", "choices": [1, 2], "answer": 0}'),
    "a.jsonl:1: there must be 2 to 10 choices, got 1": ("a.jsonl", '{"question": "q", "choices": ["x"], "answer": 0}'),
    "b.csv: No such file": ("a.csv", ""),
}


@pytest.mark.parametrize("text", WRONG)
def test_what_is_wrong_in_a_file_is_named(tmp_path: Path, text: str) -> None:
    name, content = WRONG[text]
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError) as raised:
        mmlu(str(tmp_path / ("b.csv" if text.startswith("b.") else name)), None, 0, None)
    assert text in str(raised.value)


@pytest.mark.parametrize(
    ("text", "options", "found"),
    [
        ("so\n#### 1,234.\n", {}, "1234"),
        ("#### 1 and #### 2", {}, "1"),
        ("#### 1 and #### 2", {"last": True}, "2"),
        ("it is $7.", {"pattern": r"\$?\d+"}, "7"),
        ("no number", {}, None),
    ],
)
def test_the_answer_in_a_text(text: str, options: dict[str, Any], found: str | None) -> None:
    assert Exam("gsm8k", (), 0, **options).answer(text) == found


def side(name: str, *found: str | None) -> ExamSide:
    return ExamSide(name, [ExamAnswer(str(i), each, "4", f"text {each}") for i, each in enumerate(found)])


def test_differences() -> None:
    ours, other = side("a", "4", "5", None), side("b", "4", "6", "4")
    assert [each.ours.name for each in differences(ours, other)] == ["1", "2"]
    assert (ours.score, other.score) == (pytest.approx(1 / 3), pytest.approx(2 / 3))
    assert not differences(ours, ours)
    with pytest.raises(ConfigError, match="different questions"):
        differences(ours, side("c", "4"))


class Scripted(BaseHTTPRequestHandler):
    """Prefers " A" for whatever is asked, and says 4; asked plainly it says 5 to the second problem."""

    ahead = 3
    seen: list[dict[str, Any]]

    def do_GET(self) -> None:
        self.answer({"data": [{"id": "m", "speculative_steps": self.ahead}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.seen.append(body)
        if "echo" in body:
            prompt = body["prompt"]
            places = [*range(0, len(prompt) - 2, 7), len(prompt) - 2, len(prompt)]
            scores = [None, *[-9.0] * (len(places) - 3), -1.0 if prompt.endswith(" A") else -2.0, -5.0]
            self.answer({"choices": [{"text": prompt, "logprobs": {"token_logprobs": scores, "text_offset": places}}]})
        else:
            asked = body.get("prompt") or body["messages"][0]["content"]
            text = " #### 5" if "speculative" in body and "Many" in asked.split("\n\n")[-1] else " #### 4"
            self.answer({"choices": [{"text": text} if "prompt" in body else {"message": {"content": text}}]})

    def answer(self, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    Scripted.seen = []
    made = ThreadingHTTPServer(("127.0.0.1", 0), Scripted)
    Thread(target=made.serve_forever, args=(0.02,), daemon=True).start()
    yield f"http://127.0.0.1:{made.server_port}"
    made.shutdown()
    made.server_close()


def test_a_server_is_asked_twice(files: Path, server: str, capsys: pytest.CaptureFixture[str]) -> None:
    questions = ["--data", str(files / "some_words_test.csv"), "--dev", str(files / "some_words_dev.csv"), "--shots", "1"]
    assert run(["--task", "mmlu", *questions, "--base-url", f"{server}/v1"]) == 0
    said = capsys.readouterr().out
    assert "score       0.5000" in said and "2 of 2 answers are the same, 0 differ" in said
    assert [("speculative" in each) for each in Scripted.seen].count(True) == 4, "four options, with and without"

    problems = ["--task", "gsm8k", "--data", str(files / "g.jsonl"), "--base-url", server]
    file = files / "out.json"
    assert run([*problems, "--output-file", str(file)]) == 1
    said = capsys.readouterr().out
    assert "1 of 2 answers are the same, 1 differ; 1 of the texts differ" in said
    assert "g.jsonl:2: '4', plain: '5', right: 1000" in said
    made = json.loads(file.read_text())
    assert (made["scores"], made["differing"], made["differing_texts"]) == ([0.5, 0.5], ["g.jsonl:2"], 1)
    assert run([*problems, "--tolerance", "1"]) == 0
    assert run([*problems, "--against", str(file), "--chat"]) == 0
    assert run([*problems, "--other-url", server]) == 0


def test_of_another_server_there_is_only_a_score(
    files: Path, server: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Scripted, "ahead", 0)
    assert run(["--task", "gsm8k", "--data", str(files / "g.jsonl"), "--base-url", server]) == 0
    assert "compared    with nothing" in capsys.readouterr().out


def test_what_a_server_cannot_do_is_said(files: Path, server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    questions = mmlu(str(files / "some_words_test.csv"), None, 0, None)
    with pytest.raises(ConfigError, match="--chat"):
        ExamServer(server, "m", chat=True).scores(questions)
    with pytest.raises(RequestFailed, match=r"127\.0\.0\.1:1/v1/models"):
        ExamServer("http://127.0.0.1:1", "m").listed()
    monkeypatch.setattr(Scripted, "do_POST", lambda self: self.answer({"choices": [{"text": ""}]}))
    with pytest.raises(RequestFailed, match="no log-probabilities of the prompt"):
        ExamServer(server, "m").scores(questions)
    monkeypatch.setattr(Scripted, "do_POST", lambda self: self.send_error(400, "no"))
    with pytest.raises(RequestFailed, match="HTTP 400"):
        ExamServer(server, "m").scores(questions)


def test_the_bundled_model_in_this_process(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = ["--model", "demo", "--speculative-algorithm", "NEXTN", "--max-total-tokens", "2048"]
    file = files / "out.json"
    assert run(["--task", "mmlu", "--data", str(files / "some_words_test.csv"), *model, "--output-file", str(file)]) == 0
    assert "2 of 2 answers are the same" in capsys.readouterr().out
    for each in json.loads(file.read_text())["sides"]:
        assert all(
            len(one["scores"]) == 2 and all(math.isfinite(score) and score < 0 for score in one["scores"]) for one in each["answers"]
        )
    assert run(["--task", "gsm8k", "--data", str(files / "g.jsonl"), "--max-tokens", "12", *model]) == 0
    assert "2 of 2 answers are the same, 0 differ; 0 of the texts differ" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ([], "give --base-url, a server, or --model"),
        (["--model", "demo", "--regex", "("], "--regex '\\('"),
        (["--model", "demo", "--shots", "1"], "--shots 1: no --dev has 0 questions"),
        (["--model", "demo", "--limit", "0"], "limit must be at least 1"),
        (["--model", "demo", "--chat"], "are for --base-url"),
        (["--base-url", "http://127.0.0.1:1", "--page-size", "4"], "--page-size is for --model without"),
        (["--model", "demo", "--against", "nothing.json"], "--against nothing.json: No such file"),
    ],
)
def test_command_lines_that_cannot_be(files: Path, options: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        run(["--task", "gsm8k", "--data", str(files / "g.jsonl"), *options])
