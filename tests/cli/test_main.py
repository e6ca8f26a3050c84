"""What a shell sees: exit codes, one line of error, no traceback."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from mtpserve import __version__
from mtpserve.cli import main as cli
from mtpserve.cli.options import COMMON, all_options, dashed
from mtpserve.core.errors import EngineDead, LoadError
from tests.house.tree import ROOT


def shell(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])}
    return subprocess.run([sys.executable, "-m", "mtpserve", *arguments], env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("arguments", [["version"], ["--version"]])
def test_version(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 0
    assert capsys.readouterr().out == f"mtpserve {__version__}\n"


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert (cli.main(["--help"]), cli.main([])) == (0, 2)
    out = capsys.readouterr().out
    assert all(command in out for command in cli.COMMANDS)


@pytest.mark.parametrize("command", ["launch", "generate", "inspect"])
def test_each_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        cli.main([command, "--help"])
    assert done.value.code == 0
    assert "--speculative-algorithm" in capsys.readouterr().out


def test_help_shows_common_options_and_help_all_every_one(capsys: pytest.CaptureFixture[str]) -> None:
    def shown(*more: str) -> str:
        with pytest.raises(SystemExit) as done:
            cli.main(["launch", "--help", *more])
        assert done.value.code == 0
        return capsys.readouterr().out

    common, whole = shown(), shown("all")
    names = {dashed(option.name): option for option in all_options()}
    assert {option.name for option in names.values()} >= COMMON
    for name, option in names.items():
        assert re.search(rf"^  --{name}(,| |$)", whole, re.MULTILINE), name
        assert bool(re.search(rf"^  --{name}(,| |$)", common, re.MULTILINE)) is (option.name in COMMON), name
    assert "--help all lists all" in common and "lists all" not in whole
    for leak in ("(default: )", "False)", "True)", "('", "--no-disable", "options:\n  --"):
        assert leak not in whole, leak
    assert max(map(len, whole.splitlines())) < 130


@pytest.mark.parametrize(
    ("word", "there", "not_there"),
    [
        ("Spec", ("--speculative-num-steps", "speculative decoding:"), ("--model", "scheduling:")),
        ("cpu thr", ("--cpu-threads", "--cpu-affinity"), ("--port",)),
        ("max-model-len", ("--context-length", "model and weights:"), ("--dtype", "speculative decoding:")),
    ],
)
def test_help_with_a_word(capsys: pytest.CaptureFixture[str], word: str, there: tuple[str, ...], not_there: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as done:
        cli.main(["launch", "--help", word])
    shown = capsys.readouterr().out
    assert done.value.code == 0 and all(text in shown for text in there)
    assert not any(re.search(rf"^ *{text}(,| |$)", shown, re.MULTILINE) for text in not_there)


def test_help_with_an_unknown_word_names_the_subjects(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["launch", "--help", "zebra"]) != 0
    assert "--help zebra: no option and no subject has this word; subjects: 'model and weights', " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"),
    [(LoadError("/x/model.safetensors: no such file"), 1), (EngineDead("the engine process was killed by SIGKILL"), 1)],
)
def test_an_error_is_one_line(error: Exception, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(arguments: object) -> int:
        raise error

    monkeypatch.setattr(cli, "dispatch", fail)
    assert cli.main([]) == code
    assert capsys.readouterr().err == f"mtpserve: {error}\n"


@pytest.mark.parametrize(
    "arguments",
    [["lunch"], ["serve", "--prot", "1"], ["launch", "--prot", "1"], ["launch", "--port", "x"], ["generate", "--temperature", "x", "a"]],
)
def test_a_mistake_is_exit_code_2_and_one_line(arguments: list[str]) -> None:
    done = shell(*arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("mtpserve: ")
    assert (done.stderr.count("\n"), done.stdout) == (1, "")


def test_sampling_mistakes_are_command_line_mistakes(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "--temperature", "-1", "a"]) == 2
    assert "--temperature" in capsys.readouterr().err
