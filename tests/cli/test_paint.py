"""What is left on the screen: the text, with no trace of the rejected drafts that stood at its end for one step."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from mtpserve.cli.paint import Painter, advance

STYLE = re.compile(r"\x1b\[[\d;]*m")


def screen(raw: str, width: int) -> list[str]:
    """A terminal of endless height: printing, new lines, cursor left, erase to the end of the line."""
    rows, column = [""], 0
    for part in re.findall(r"\x1b\[(\d*)([DK])|(.)", STYLE.sub("", raw), re.DOTALL):
        count, command, character = part
        if command == "D":
            column = max(0, column - int(count))
        elif command == "K":
            rows[-1] = rows[-1][:column]
        elif character == "\n":
            rows, column = [*rows, ""], 0
        else:
            if column == width:
                rows, column = [*rows, ""], 0
            rows[-1] = rows[-1][:column].ljust(column) + character
            column += 1
    return rows


def painter(width: int = 20, keep: bool = False, terminal: bool = True) -> tuple[Painter, io.StringIO]:
    file = io.StringIO()
    console = Console(
        file=file, force_terminal=terminal, color_system="standard" if terminal else None, width=width, legacy_windows=False, _environ={}
    )
    return Painter(console, keep), file


STEPS: list[tuple[list[str], str, list[str]]] = [
    ([" world", ","], " and", []),
    (["\n"], "x", ["y", "z"]),
    ([], " long words that wrap", ["over", " the", " edge", " of", " the", " line"]),
    (["1"], "2", ["rejected\nwith\ta break"]),
    ([], "", ["last"]),
]
TEXT = "hello" + "".join("".join(accepted) + own for accepted, own, _ in STEPS)


@pytest.mark.parametrize("width", [7, 20, 21, 22, 23, 80])
def test_rejected_drafts_leave_no_trace(width: int) -> None:
    paint, file = painter(width)
    paint.prompt("hello")
    for step in STEPS:
        paint.step(*step)
    paint.end()
    plain = [row[i : i + width] for row in TEXT.split("\n") for i in range(0, max(1, len(row)), width)]
    assert [row.rstrip() for row in screen(file.getvalue(), width)] == [row.rstrip() for row in [*plain, ""]]


def test_rejected_drafts_are_there_meanwhile_and_struck_out() -> None:
    paint, file = painter(80)
    paint.step(["yes"], " own", [" no"])
    assert "\x1b[32myes\x1b[0m own" in file.getvalue()
    assert screen(file.getvalue(), 80) == ["yes own no"]
    assert re.search(r"\x1b\[[\d;]*9[\d;]*m no", file.getvalue())


def test_they_stay_when_asked_to() -> None:
    paint, file = painter(80, keep=True)
    paint.step(["yes"], " own", [" no"])
    paint.step([], " more", [])
    paint.end()
    assert screen(file.getvalue(), 80) == ["yes own no more", ""]


def test_a_pipe_gets_the_text_alone() -> None:
    paint, file = painter(20, terminal=False)
    paint.prompt("hello")
    for step in STEPS:
        paint.step(*step)
    paint.end()
    assert file.getvalue() == f"{TEXT.removeprefix('hello')}\n"


@pytest.mark.parametrize(("texts", "expected"), [([], ""), (["a\n", ""], "a\n"), (["a\n", "b"], "a\nb\n")])
def test_the_last_line_in_a_pipe_ends(texts: list[str], expected: str) -> None:
    paint, file = painter(20, terminal=False)
    for text in texts:
        paint.step([], text, [])
    paint.end()
    assert file.getvalue() == expected


def test_the_model_cannot_command_the_terminal() -> None:
    paint, file = painter(80)
    paint.step(["\x1b]0;title\x07"], "\x9b2J", ["\x1b[2J"])
    assert re.sub(r"\x1b\[[\d;]*[mDK]", "", file.getvalue()).isprintable()


@pytest.mark.parametrize(
    ("column", "text", "expected"),
    [
        (0, "", 0),
        (3, "ab", 5),
        (3, "ab\n", 0),
        (3, "ab\nc", 1),
        (8, "ab", 0),
        (0, "\t", 8),
        (7, "\tx", 9),
        (0, "漢字", 4),
        (0, "e\u0301", 1),
    ],
)
def test_the_cursor_is_followed(column: int, text: str, expected: int) -> None:
    assert advance(column, text, 10) == expected
