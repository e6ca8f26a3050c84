"""The log as text and as JSON lines, of all processes; what it says of requests, and what it leaves out."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from mtpserve.config import EngineConfig, ParallelConfig
from mtpserve.core import logs
from mtpserve.core.sampling import SamplingParams, Speculation
from mtpserve.engine.parallel.rank_messages import SharedFiles, StartRank
from mtpserve.engine.process import process
from mtpserve.engine.process.messages import Start
from mtpserve.engine.startup import build, rank
from mtpserve.server.http.redaction import redacted
from tests.server.forked import ROOT
from tests.server.test_launch import free_port, launched

HELLO = {"prompt": "hello", "max_tokens": 3}


def parsed(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


@contextmanager
def bare_root() -> Iterator[logging.Logger]:
    """The root logger without handlers, pytest's among them; all that configure changes is as before then."""
    root = logging.getLogger()
    before = root.handlers[:], root.level, sys.excepthook, threading.excepthook, warnings.showwarning
    root.handlers.clear()
    try:
        yield root
    finally:
        logging.captureWarnings(False)
        root.handlers[:], root.level, sys.excepthook, threading.excepthook, warnings.showwarning = before


def test_a_line_of_json_has_all_that_a_record_has(capsys: pytest.CaptureFixture[str]) -> None:
    with bare_root():
        logs.configure("info", "json", process="engine 3")
        assert logs.current_format() == "json"
        token = logs.REQUEST_ID.set("outer")
        log = logging.getLogger("mtpserve.some")
        log.info("a %d\nb", 1, extra={"tokens": 5, "path": Path("/x")})
        try:
            raise ValueError("bad")
        except ValueError:
            log.exception("failed", extra={"request_id": "inner"})
        warnings.warn("old", UserWarning, stacklevel=1)
        logs.REQUEST_ID.reset(token)
        log.debug("not shown")
        thread = threading.Thread(target=lambda: 1 / 0)
        thread.start()
        thread.join()
    first, second, third, fourth = parsed(capsys.readouterr().err)
    assert datetime.fromisoformat(first.pop("time")).tzinfo is not None and isinstance(first.pop("pid"), int)
    named = {"level": "info", "logger": "mtpserve.some", "process": "engine 3", "request_id": "outer"}
    assert first == named | {"message": "a 1\nb", "tokens": 5, "path": "/x"}
    assert second["request_id"] == "inner" and second["exception"].endswith("ValueError: bad") and second["level"] == "error"
    assert "UserWarning: old" in third["message"] and third["level"] == "warning"
    assert fourth["level"] == "critical" and "ZeroDivisionError" in fourth["exception"] and "request_id" not in fourth


def test_a_text_that_is_no_unicode_is_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    with bare_root():
        logs.configure("info", "json")
        logging.getLogger("x").info("a \udc80 ü")
    assert parsed(capsys.readouterr().err)[0]["message"] == "a \udc80 ü"


@pytest.mark.parametrize("format", logs.LOG_FORMATS)
def test_warnings_of_options_wait_for_the_format(format: str, capsys: pytest.CaptureFixture[str]) -> None:
    with bare_root(), logs.held_records():
        logging.getLogger("x").warning("early")
        assert capsys.readouterr().err == ""
        logs.configure("info", format)
        logging.getLogger("x").warning("late")
    lines = capsys.readouterr().err.splitlines()
    assert [json.loads(line)["message"] if format == "json" else line.split()[-1] for line in lines] == ["early", "late"]


def test_warnings_of_options_are_seen_where_nothing_starts(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        with logs.held_records():
            logging.getLogger("x").warning("early")
            raise ValueError("bad")

    with bare_root() as root:
        with pytest.raises(ValueError, match="bad"):
            fail()
        assert capsys.readouterr().err == "early\n" and not root.handlers


class Scripted:
    """A pipe, or a wire, that gives the first message alone and keeps what is sent."""

    def __init__(self, message: object) -> None:
        self._message, self.sent = message, list[object]()
        self.wait = self.receive = lambda: self._message

    def send(self, message: object) -> None:
        self.sent.append(message)


def broken(*_: object, **__: object) -> None:
    raise ValueError("bad")


def test_an_engine_and_its_ranks_log_as_they_are_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    config, parallel = EngineConfig(), ParallelConfig(data_parallel_size=2)
    several = replace(config, parallel=parallel, replica=1)
    monkeypatch.setattr(build, "build_rank", broken)
    for format in logs.LOG_FORMATS:
        for engine in (config, several):
            with bare_root():
                assert process.run(cast("Any", Scripted(Start(engine, False, "info", format))), f"{__name__}:broken") == 1
            with bare_root():
                wire = Scripted(StartRank(replace(engine, rank=2), logging.INFO, format))
                assert rank.run(cast("Any", wire), SharedFiles()) == 1
            text = capsys.readouterr().err
            if format == "json":
                lines = parsed(text)
                assert [line["process"] for line in lines] == [f"engine {engine.replica}", f"engine {engine.replica} rank 2"]
                assert all(line["exception"].endswith("ValueError: bad") for line in lines)
            else:
                names = ("engine 1: ", "engine 1 rank 2: ") if engine is several else ("", "rank 2: ")
                assert f"ERROR {names[0]}the engine process stops because of an error\n" in text and f"CRITICAL {names[1]}fails\n" in text


def test_every_line_of_a_server_is_one_object(checkpoint: Path) -> None:
    with launched(checkpoint, "--log-format", "json", "--port", str(port := free_port()), "--log-requests", ready=False) as server:
        transport = httpx.HTTPTransport(retries=50)
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", transport=transport) as http:
            while http.get("/health").status_code != 200:
                pass
            assert http.post("/v1/completions", json=HELLO, headers={"x-request-id": "mine"}).status_code == 200
            assert http.post("/v1/completions", json={"prompt": 5.5}, headers={"x-request-id": "wrong"}).status_code == 400
        server.process.terminate()
        code, log = server.end(60)
        lines = parsed(log)
    assert code == 0 and all(line["time"] and line["level"] and line["logger"] and line["process"] == "server" for line in lines)
    (ready,) = [line for line in lines if line["message"].startswith("mtpserve is ready")]
    assert ready["url"] == f"http://127.0.0.1:{port}" and ready["curl"].startswith("curl ")
    (request, answer), (refused,) = ([line for line in lines if line.get("request_id") == id] for id in ("mine", "wrong"))
    assert (request["prompt"], request["prompt_tokens"], request["sampling"]["max_tokens"]) == ("<|begin|>hello", 6, 3)
    assert (answer["method"], answer["path"], answer["status"]) == ("POST", "/v1/completions", 200) and answer["client"].startswith(
        "127.0.0.1:"
    )
    assert refused["status"] == 400 and "got 5.5" in refused["failure"]


def test_a_server_that_cannot_start_says_so_in_its_format() -> None:
    command = [sys.executable, "-m", "mtpserve", "launch", "demo", "--log-format", "json", "--host", "256.0.0.1", "--trust-remote-code"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    warning, *_, error = parsed(done.stderr)
    assert done.returncode == 1 and "cannot listen on 256.0.0.1" in error["message"] and error["level"] == "critical"
    assert warning["message"].startswith("--trust-remote-code is ignored, it changes nothing here")


def test_only_what_differs_from_the_defaults_is_shown() -> None:
    assert logs.non_default_fields(SamplingParams()) == {}
    params = SamplingParams(max_tokens=8, temperature=0, stop=("x",), speculation=Speculation(num_steps=2))
    assert logs.non_default_fields(params) == {"max_tokens": 8, "temperature": 0, "stop": ("x",), "speculation": {"num_steps": 2}}


@pytest.mark.parametrize(("message", "logged"), [
    ("max_tokens must be below the context of 2048, got 5000", None),
    ("messages.0: content of type 'image_url' is not supported; only text is", None),
    ("messages.0: content of type 'my own words' is not supported", "messages.0: content of type … is not supported"),
    ("Content-Encoding 'gzip' is not supported: send the body as it is", None),
    ("effort: Input should be 'low', 'medium' or 'high', got 'extreme'", None),
    ("effort: Input should be 'low' or 'high', got 'a secret'", "effort: Input should be 'low' or 'high', got a string"),
    ("seed: Input should be a valid integer, got 'secret'; n: Input should be at least 1, got 0",
     "seed: Input should be a valid integer, got a string; n: Input should be at least 1, got 0"),
    ("prompt: Input should be a valid string, got [1, 2, 'secret']; n: got 1", "prompt: Input should be a valid string, got a list"),
    ("prompt must be text, got {'a': 1}", "prompt must be text, got an object"),
    ("temperature must be in [0, 100], got 12 secrets", "temperature must be in [0, 100], got …"),
    ("the id \"a type 'secret'\" is that of another request", "the id … is that of another request"),
    (r"the id 'it\'s \"mine\"' is that of another", "the id … is that of another"),
    ("stop must be at most 16 strings, got ('secret',)", "stop must be at most 16 strings, got a list"),
    ("logit_bias must have token ids as keys, got 'it is got 5'", "logit_bias must have token ids as keys, got a string"),
])  # fmt: skip
def test_numbers_types_and_names_are_logged_and_texts_are_not(message: str, logged: str | None) -> None:
    assert redacted(message) == (message if logged is None else logged)


def test_models_names_are_logged() -> None:
    message = "the model 'gpt-9' does not exist; this server offers 'a/b', 'demo'"
    assert redacted(message, names_models=True) == message
    assert redacted("the model 'say it aloud' does not exist", names_models=True) == "the model … does not exist"
