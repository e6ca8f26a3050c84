"""Commands that README.md and docs/ show do what they say: run where a CPU can with the bundled model, parsed otherwise."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.docs.shown import OWN, PAGES, ROOT, Block, blocks, commands, inline, parse, words

BLOCKS = [block for page in PAGES for block in blocks(page)]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")]), "OMP_NUM_THREADS": "1"}
SERVE = "mtpserve launch --model demo --speculative-algorithm NEXTN"  # what `make serve` runs


def shells(*modes: str) -> list[Block]:
    return [block for block in BLOCKS if block.mode in modes and block.language != "python"]


def one_each(found: list[Block]) -> list[Block]:
    """README and docs show some commands twice."""
    return list({block.text: block for block in found}.values())


def request_body(command: str) -> str | None:
    parts = shlex.split(command)
    return parts[parts.index("-d") + 1] if "-d" in parts else None


def check_pip(command: str) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for named in re.findall(r"mtpserve\[([\w,]+)\]", command):
        assert set(named.split(",")) <= extras.keys(), command


def check(command: str) -> None:
    """What can be said of a command without running it."""
    first, *rest = shlex.split(command, comments=True)
    if OWN.match(command):
        parse(words(command))
    elif first == "make":
        assert re.search(rf"^{rest[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), command
    elif first == "curl":
        body = request_body(command)
        assert body is None or isinstance(json.loads(body), dict)
    elif first == "python":
        script = Path(rest[0]) if rest[0] != "-m" else Path(*rest[1].split(".")).with_suffix(".py")
        assert (ROOT / script).is_file() or rest[1].startswith("sglang"), command
    elif Path(first).name == "pip":
        check_pip(command)
    else:
        assert first == "vllm", f"{command}: say above the block why it is not run, `<!-- skipped: … -->`"


def test_there_are_such_commands() -> None:
    modes = [block.mode for block in BLOCKS]
    assert modes.count("run") >= 8
    assert modes.count("parsed") >= 8


@pytest.mark.parametrize("block", shells("run", "parsed"), ids=lambda block: block.place)
def test_they_are_parsed(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # --config names files of the repository
    found = commands(block)
    assert found, block.place
    for command in found:
        check(command)


@pytest.mark.parametrize("block", shells("skipped"), ids=lambda block: block.place)
def test_what_is_skipped_has_none_of_ours_that_could_be_parsed(block: Block) -> None:
    assert not any(OWN.match(command) for command in commands(block))


def test_every_command_for_those_who_come_from_others_is_parsed() -> None:
    found = inline(ROOT / "docs" / "faq.md")
    assert len(found) >= 20
    for command in found:
        parse(words(command))


def test_make_serve_is_what_the_docs_say() -> None:
    assert re.search(rf"^serve: .*\n.*{SERVE} \$\(SERVE_ARGS\)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert all(SERVE in page.read_text() for page in PAGES if page.name in ("README.md", "start.md"))


# ------------------------------------------------------------------------------------------------------------ what is run


@dataclass(frozen=True, slots=True)
class Shell:
    """Runs commands as a user would, with the server's port in place of 30000."""

    url: str

    def run(self, command: str) -> str:
        command = re.sub(r"^(\.venv/bin/)?mtpserve\b", f"{shlex.quote(sys.executable)} -m mtpserve", command)
        command = re.sub(r"^curl\b", "curl --silent --show-error --fail-with-body", command.replace("http://127.0.0.1:30000", self.url))
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", command], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout


@pytest.fixture(scope="module")
def shell() -> Iterator[Shell]:
    if shutil.which("bash") is None or shutil.which("curl") is None:
        pytest.skip("bash or curl is not installed")
    command = [sys.executable, "-m", *SERVE.split(), "--port", "0"]
    with subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        try:
            assert server.stdout is not None
            found = re.search(r"http://\S+", server.stdout.readline())  # the line that says that it is ready
            assert found, "the server has ended"
            yield Shell(found[0])
            server.terminate()
            assert server.wait(timeout=120) == 0
        finally:
            server.kill()


@pytest.mark.parametrize("block", one_each(shells("run")), ids=lambda block: block.place)
def test_they_run(block: Block, shell: Shell) -> None:
    ran = [command for command in commands(block) if not re.match(r"make\b|(\.venv/bin/)?mtpserve (launch|serve)\b", command)]
    for command in ran:  # the server runs: see the fixture
        assert shell.run(command).strip(), command


@pytest.mark.parametrize(
    "block", one_each([block for block in BLOCKS if block.language == "python" and block.mode == "run"]), ids=lambda block: block.place
)
def test_python_runs(block: Block) -> None:
    done = subprocess.run(
        [sys.executable, "-c", block.text], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
