"""Calls written as the models' chat templates write them come back as the very calls, whatever their arguments are."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, strategies as st

from mtpserve.text.parsers.formats.deepseek import CALL, CALL_END, SECTION, SECTION_END, SEPARATOR
from mtpserve.text.parsers.reasoning import Opening
from tests import selection
from tests.text.calls import parse
from tests.text.test_parsers import CALLS, CALLS_END, MINIMAX, MINIMAX_END

Arguments = dict[str, Any]
Calls = Sequence[tuple[str, Arguments]]


def dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def as_object(name: str, arguments: Arguments, key: str = "arguments", **more: str) -> str:
    return dumped({"name": name, key: arguments} | more)


def glm(name: str, arguments: Arguments, line: str = "\n") -> str:
    pairs = [
        f"<arg_key>{key}</arg_key>{line}<arg_value>{value if isinstance(value, str) else dumped(value)}</arg_value>{line}"
        for key, value in arguments.items()
    ]
    return f"<tool_call>{name}{line}{''.join(pairs)}</tool_call>"


def coder(name: str, arguments: Arguments, line: str = "\n") -> str:
    """Lists and objects are JSON; everything else is printed as Python prints it."""
    values = {key: dumped(value) if isinstance(value, list | dict) else str(value) for key, value in arguments.items()}
    inside = "".join(f"<parameter={key}>{line}{value}{line}</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{inside}</function>\n</tool_call>"


def v3(name: str, arguments: Arguments) -> str:
    return f"{CALL}function{SEPARATOR}{name}\n```json\n{dumped(arguments)}\n```{CALL_END}"


def dsml(name: str, arguments: Arguments) -> str:
    inside = [
        f'<｜DSML｜parameter name="{key}" string="{"true" if isinstance(value, str) else "false"}">'
        f"{value if isinstance(value, str) else dumped(value)}</｜DSML｜parameter>"
        for key, value in arguments.items()
    ]
    return "\n".join([f'<｜DSML｜invoke name="{name}">', *(inside or [""]), "</｜DSML｜invoke>"])


def minimax(name: str, arguments: Arguments) -> str:
    values = {key: value if isinstance(value, str) else dumped(value) for key, value in arguments.items()}
    inside = "".join(f'<parameter name="{key}">{value}</parameter>\n' for key, value in values.items())
    return f'<invoke name="{name}">\n{inside}</invoke>\n'


def harmony(name: str, arguments: Arguments) -> str:
    return f"<|start|>assistant<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{dumped(arguments)}<|call|>"


def python(name: str, arguments: Arguments) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def gemma(value: Any) -> str:
    """Keys that are no plain words are written as strings are."""
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, list):
        return f"[{','.join(map(gemma, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key if key.isidentifier() else gemma(key)}:{gemma(each)}' for key, each in value.items())}}}"
    return dumped(value)


LONGCAT = "<longcat_tool_call>\n{}\n</longcat_tool_call>"
WRITERS: dict[str, tuple[str, Callable[[Calls], str]]] = {
    "Qwen3, MiMo-7B, Hermes": ("hermes", lambda calls: "\n".join(f"<tool_call>\n{as_object(*call)}\n</tool_call>" for call in calls)),
    "DeepSeek-V3, R1": ("deepseek_v3", lambda calls: SECTION + "\n".join(v3(*call) for call in calls) + SECTION_END),
    "DeepSeek-V3.1": (
        "deepseek_v31",
        lambda calls: SECTION + "".join(f"{CALL}{name}{SEPARATOR}{dumped(each)}{CALL_END}" for name, each in calls) + SECTION_END,
    ),
    "DeepSeek-V3.2": ("deepseek_v32", lambda calls: "\n".join([CALLS, *(dsml(*call) for call in calls), CALLS_END])),
    "gpt-oss": ("openai", lambda calls: "".join(harmony(*call) for call in calls)),
    "GLM-4.5": ("glm45", lambda calls: "\n".join(glm(*call) for call in calls)),
    "GLM-4.7": ("glm47", lambda calls: "".join(glm(*call, line="") for call in calls)),
    "LongCat-Flash": ("longcat", lambda calls: "".join(LONGCAT.format(as_object(*call)) for call in calls)),
    "Qwen3-Coder": ("qwen3_coder", lambda calls: "\n".join(coder(*call) for call in calls)),
    "MiMo-V2": ("mimo", lambda calls: "\n".join(coder(*call, line="") for call in calls)),
    "MiniMax-M2": ("minimax_m2", lambda calls: f"{MINIMAX}\n{''.join(minimax(*call) for call in calls)}{MINIMAX_END}"),
    "Llama 3": ("llama3_json", lambda calls: "; ".join(as_object(*call, key="parameters") for call in calls)),
    "Llama 3.2": ("pythonic", lambda calls: f"[{', '.join(python(*call) for call in calls)}]"),
    "LFM2": ("lfm2", lambda calls: f"<|tool_call_start|>[{', '.join(python(*call) for call in calls)}]<|tool_call_end|>"),
    "Gemma 4": ("gemma4", lambda calls: "".join(f"<|tool_call>call:{name}{gemma(each)}<tool_call|>" for name, each in calls)),
    "Mistral-7B-v0.3": ("mistral", lambda calls: f"[TOOL_CALLS] [{', '.join(as_object(*call, id='abcdefgh9') for call in calls)}]"),
    "Mistral-Small-3.2": (
        "mistral",
        lambda calls: "".join(f"[TOOL_CALLS]{name}[CALL_ID]abcdefgh9[ARGS]{dumped(each)}" for name, each in calls),
    ),
}

HARD = [
    "", " a ", "\n", "\n\nlines\n\n", 'say "hi" \\ and \\"', "a\tb\r\nc", "12", "true", "null", "None", "{}", '{"name": "now"}',
    "}]}\"'`", "```", "```json\n{}\n```", "<think>", "</think>", "<tool_call>\nnow\n</tool_call>", "</tool_call>", "</function>",
    "<b>\n</parameter>\n</b>", "</parameter> x", "</arg_value>\nx", "</｜DSML｜parameter> x",
    "[TOOL_CALLS]now[ARGS]{}", "<|python_tag|>; ", CALL_END,
    SECTION_END, "Zürich 世界 🎉", "\u2028", "&lt;",
]  # fmt: skip
TEXT = st.sampled_from(HARD) | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<"), max_size=8)
NUMBER = st.integers(-(10**6), 10**6) | st.floats(-1e6, 1e6, allow_nan=False).map(lambda number: round(number, 3) + 0.5)
ANY = st.recursive(
    st.none() | st.booleans() | NUMBER | TEXT,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=4,
)
SAVE = st.fixed_dictionaries(
    {},
    optional={
        "text": TEXT,
        "tags": st.lists(TEXT, max_size=2),
        "limit": NUMBER | st.none(),
        "place": st.dictionaries(TEXT, ANY, max_size=2),
        "unknown": st.lists(ANY, max_size=2),
    },
)
SEVERAL = st.lists(st.tuples(st.just("save"), SAVE) | st.tuples(st.just("now"), st.just({})), min_size=1, max_size=3)


@pytest.mark.parametrize("writer", WRITERS)
@selection.examples(30)
@given(st.data())
def test_what_a_template_writes_is_read_back(writer: str, data: st.DataObject) -> None:
    format, write = WRITERS[writer]
    calls = data.draw(SEVERAL)
    content = data.draw(st.sampled_from(["", "Let me look.\n\n"]))
    text = content + write(calls)
    for pieces in ([text], list(text)):
        found = parse(pieces, format)
        assert [(name, json.loads(arguments)) for name, arguments in found.calls] == list(calls)
        assert (found.content, found.raw) == (content.rstrip(), text)


@pytest.mark.parametrize("writer", WRITERS)
def test_calls_end_reasoning_that_has_no_end(writer: str) -> None:
    format, write = WRITERS[writer]
    written = write([("save", {"text": "a"}), ("now", {})])
    marked = format not in ("llama3_json", "pythonic")  # a bracket alone is no mark
    for pieces in ([f"I will.\n{written}\n"], list(f"I will.\n{written}\n")):
        found = parse(pieces, format, "qwen3", Opening.INSIDE)
        assert found.raw == "".join(pieces)
        if marked:
            assert (found.reasoning, found.content, [name for name, _ in found.calls]) == ("I will.", "", ["save", "now"])
    for rest in ("?\n</think>\n\nDone.", "\n</think>\n\nDone.", " Or not?</think>Done."):
        found = parse(list(f"I could: {written}{rest}"), format, "qwen3", Opening.INSIDE)
        assert (found.content, found.calls) == ("Done.", []) and found.reasoning.startswith("I could: ")
