"""Wherever an output is cut, the same is found in it, and no character is lost, however broken it is."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from mtpserve.text.parsers.formats.deepseek import CALL, CALL_END, SECTION, SECTION_END, SEPARATOR
from mtpserve.text.parsers.reasoning import Opening
from mtpserve.text.parsers.registry import REASONINGS, TOOL_CALLS
from tests import selection
from tests.text.calls import parse
from tests.text.test_parsers import CALLS, CALLS_END, GOLDEN

TAGS = ["<tool_call>", "</tool_call>"]
KEYS = ["text", "tags", "limit"]
INVOKE = ['<｜DSML｜invoke name="', '<｜DSML｜parameter name="', '" string="true">', '" string="false">']
SHARDS = {
    "hermes": TAGS,
    "glm45": [*TAGS, *KEYS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"],
    "qwen3_coder": [*TAGS, *KEYS, "<function=", "</function>", "<parameter=", "</parameter>", ">"],
    "mimo": [*TAGS, *KEYS, "<function=", "</function>", "<parameter=", "</parameter>", ">"],
    "minimax_m2": [
        *KEYS,
        "<minimax:tool_call>",
        "</minimax:tool_call>",
        '<invoke name="',
        '<parameter name="',
        '">',
        "</parameter>",
        "</invoke>",
    ],
    "deepseek_v3": [SECTION, SECTION_END, CALL, CALL_END, SEPARATOR, "```json", "```"],
    "deepseek_v32": [CALLS, CALLS_END, *KEYS, *INVOKE, 'save">', "</｜DSML｜invoke>", "</｜DSML｜parameter>", "<｜", '"'],
    "openai": [
        "<|start|>",
        "<|channel|>",
        "<|message|>",
        "<|end|>",
        "<|call|>",
        "assistant",
        "analysis",
        "final",
        "commentary to=functions.",
    ],
    "llama3_json": ["<|python_tag|>", ";"],
    "pythonic": ["<|python_start|>", "<|python_end|>", "[save(", "now()", ")", "=", "'", "None", "(", *KEYS],
    "lfm2": ["<|tool_call_start|>", "<|tool_call_end|>", "[save(", ")", "=", "'", *KEYS],
    "mistral": ["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"],
}
BEGUN = '{"name": "save", "arguments": {'
JSON = ["{", "}", "[", "]", ",", ":", '"', "\\", "\\u00e4", '"name"', '"arguments"', '"parameters"', BEGUN, '"x": 1', "true"]
OTHERS = [
    " ",
    "\n",
    "\n" * 300,
    "save",
    "now",
    "a",
    "ü",
    "🎉",
    "<",
    "</",
    "<think>",
    "</think>",
    "<response>",
    "</response>",
    "function",
    "\ud7ff",
    "\x00",
    "\u2028",
    "1",
]


def outputs(format: str) -> st.SearchStrategy[str]:
    shards = st.sampled_from([*SHARDS[format] * 2, *JSON, *OTHERS]) | st.text(max_size=3)
    whole = st.sampled_from([text for name, text, _, _ in GOLDEN if name == format])
    return st.lists(shards | whole, max_size=14).map("".join)


@pytest.mark.parametrize("format", SHARDS)
@selection.examples(120)
@given(st.data())
def test_no_cut_changes_what_is_found(format: str, data: st.DataObject) -> None:
    text = data.draw(outputs(format))
    reasoning = data.draw(st.sampled_from([None, "openai_gptoss" if format == "openai" else "deepseek_r1", "qwen3", "ernie45"]))
    opening = data.draw(st.sampled_from(list(Opening)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    whole = parse([text], format, reasoning, opening)
    assert whole.raw == text
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parse(pieces, format, reasoning, opening) == whole
    assert parse(list(text), format, reasoning, opening) == whole


@pytest.mark.parametrize(("format", "text"), [golden[:2] for golden in GOLDEN])
def test_every_cut_in_two(format: str, text: str) -> None:
    whole = parse([text], format)
    assert all(parse([text[:cut], text[cut:]], format) == whole for cut in range(len(text)))


@selection.examples(100)
@given(st.sampled_from(TOOL_CALLS.names()), st.sampled_from([None, *REASONINGS.names()]), st.text())
def test_any_text_passes(format: str, reasoning: str | None, text: str) -> None:
    found = parse([text], format, reasoning)
    assert found.raw == text and not found.calls
