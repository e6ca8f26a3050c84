"""Stop strings of parsed outputs: met in the answer's text alone, at the same place however the text is cut."""

from __future__ import annotations

import random

import pytest

from mtpserve.text.detokenizer import StopStrings
from mtpserve.text.parsers.events import CallEnd, Content
from mtpserve.text.parsers.output import OutputParser
from mtpserve.text.parsers.reasoning import Opening
from mtpserve.text.parsers.registry import REASONINGS, TOOL_CALLS
from mtpserve.text.parsers.stops import AnswerStops
from tests.text.calls import TOOLS
from tests.text.test_parsers import GOLDEN

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
THOUGHT = "<think>The text says Question: and so on.</think>\n\n"


def parser(format: str | None = "hermes", reasoning: str | None = "qwen3") -> OutputParser:
    calls = TOOL_CALLS.get(format)(TOOLS) if format else None
    return OutputParser(REASONINGS.get(reasoning) if reasoning else None, Opening.MAYBE, calls)


def shown(
    text: str, stops: list[str], pieces: list[str], made: OutputParser | None = None, include: bool = False
) -> tuple[str, str | None]:
    """The text that is shown, and the stop string that was met."""
    answer = AnswerStops(made or parser(), stops, include, begins_with_answer=False)
    found = ""
    for piece in pieces:
        found += answer.feed(piece)
        if answer.matched is not None:
            return found, answer.matched
    return found + answer.finish(), answer.matched


def cuts(text: str, dice: random.Random) -> list[str]:
    places = sorted(dice.randrange(len(text) + 1) for _ in range(dice.randrange(len(text))))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


CASES = [
    (THOUGHT + "The answer is 4. Question: next", ["Question:"], THOUGHT + "The answer is 4. ", "Question:"),
    (THOUGHT + "The answer is 4.", ["Question:", "think"], THOUGHT + "The answer is 4.", None),
    (THOUGHT + "a\nb", ["\n"], THOUGHT + "a", "\n"),
    (THOUGHT + f"See {CALL}\n{CALL}", ["Par", "name", "\n"], THOUGHT + f"See {CALL}\n{CALL}", None),
    (f"See {CALL}then Par is", ["Par"], f"See {CALL}then ", "Par"),
    (f"Que{CALL}stion", ["Question"], f"Que{CALL}stion", None),
    (f"See\n\n{CALL}", ["\n\n"], "See", "\n\n"),
    ("<think>never ends: Question:", ["Question:"], "<think>never ends: Question:", None),
    (f'{CALL[:-20]} Par is "', ["Par"], f'{CALL[:-20]} Par is "', None),
    ("no call: <tool_ Par", ["Par"], "no call: <tool_ ", "Par"),
    ("ends <tool", ["<tool"], "ends ", "<tool"),
]


@pytest.mark.parametrize(("text", "stops", "wanted", "matched"), CASES)
def test_stops_count_in_the_answer_alone(text: str, stops: list[str], wanted: str, matched: str | None) -> None:
    dice = random.Random(0)
    for pieces in ([text], list(text), *(cuts(text, dice) for _ in range(50))):
        assert shown(text, stops, pieces) == (wanted, matched)
    assert shown(text, stops, list(text), include=True)[0] == wanted + (matched or "")


@pytest.mark.parametrize(("format", "text"), [case[:2] for case in GOLDEN])
def test_whatever_is_cut_calls_and_reasoning_stay_whole(format: str, text: str) -> None:
    dice = random.Random(text)
    text = f"{THOUGHT}first {text} last words"
    reading = parser(format)
    events = [*reading.feed(text), *reading.finish()]
    for _ in range(40):
        begin = dice.randrange(len(text) - 1)
        stop = text[begin : begin + dice.randrange(1, 6)]
        found = {shown(text, [stop], pieces, parser(format)) for pieces in ([text], list(text), cuts(text, dice))}
        assert len(found) == 1, "the same, however it is cut"
        kept, matched = found.pop()
        assert text.startswith(kept)
        if matched is None:
            assert kept == text and not any(stop in event.text for event in events if isinstance(event, Content))
            continue
        rest = parser(format)
        before = [*rest.feed(kept), *rest.finish()]
        ends = [event.raw for event in before if isinstance(event, CallEnd)]
        assert ends == [event.raw for event in events if isinstance(event, CallEnd)][: len(ends)], "no call is cut"
        assert not any(stop in event.text for event in before if isinstance(event, Content))


def test_a_stop_behind_blanks_is_met_at_once() -> None:
    """The parser waits for what follows them, and a token that follows would count."""
    answer = AnswerStops(parser(), ["\n\n"], False, begins_with_answer=True)
    assert [answer.feed(piece) for piece in ("one", "\n", "\n")] == ["one", "", ""] and answer.matched == "\n\n"
    first = AnswerStops(parser(None, None), ["\n"], False, begins_with_answer=True)
    assert first.feed("\n") == "" and first.matched == "\n"


def test_a_call_is_shown_while_it_comes() -> None:
    answer = AnswerStops(parser(), ["Par"], False, begins_with_answer=False)
    parts = [answer.feed(piece) for piece in ("x ", CALL[:60], "q", "r")]
    assert parts[2:] == ["q", "r"] and "".join(parts) == f"x {CALL[:60]}qr"


def test_the_stop_that_ends_first_is_met_and_told() -> None:
    for stops, text, wanted, matched in (
        ([":", ")"], "):", "", ")"),
        (["()", "("], "f()", "f", "("),
        (["abcd", "bc"], "xabcd", "xa", "bc"),
        (["b", "ab"], "xab", "x", "ab"),
        (["ab", "b"], "xab", "x", "ab"),
    ):
        for pieces in ([text], list(text)):
            strings = StopStrings(stops)
            found = ""
            for piece in pieces:
                found += "" if strings.matched else strings.feed(piece)
            assert (found, strings.matched) == (wanted, matched)
