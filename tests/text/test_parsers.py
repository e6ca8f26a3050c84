"""Outputs as models write them, taken apart: each format as its chat template spells it, and what becomes of what is malformed."""

from __future__ import annotations

import json

import pytest

from mtpserve.config.server import REASONING_PARSERS, TOOL_CALL_PARSERS
from mtpserve.text.parsers.events import Arguments, CallBegin, Content, Reasoning
from mtpserve.text.parsers.reasoning import Opening, ReasoningCount
from mtpserve.text.parsers.registry import REASONINGS, TOOL_CALLS
from tests.text.calls import longcat, parse, parser, put_together


def test_the_options_list_what_there_is() -> None:
    for options, formats in ((TOOL_CALL_PARSERS, TOOL_CALLS), (REASONING_PARSERS, REASONINGS)):
        assert options[:2] == ("auto", "none") and sorted(options[2:]) == formats.names()


CITY = '{"city": "Ulm", "days": 2}'
BRACES = '{"city": "a}</tool_call>]\\"{", "x": {"y": [{}]}}'
HERMES = f'<tool_call>\n{{"name": "get_weather", "arguments": {CITY}}}\n</tool_call>'
GLM = (
    "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Ulm</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>"
)
CODER = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nUlm\n</parameter>\n<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>"
)
MIMO = CODER.replace(">\nUlm\n<", ">Ulm<").replace(">\n2\n<", ">2<")
INVOKE = '<invoke name="get_weather">\n<parameter name="city">Ulm</parameter>\n<parameter name="days">2</parameter>\n</invoke>'
MINIMAX, MINIMAX_END = "<minimax:tool_call>", "</minimax:tool_call>"
V3_CALL = f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{CITY}\n```<｜tool▁call▁end｜>"
V31_CALL = f"<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{CITY}<｜tool▁call▁end｜>"
BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
DSML = (
    '<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">Ulm</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>\n</｜DSML｜invoke>'
)
CALLS, CALLS_END = "<｜DSML｜function_calls>", "</｜DSML｜function_calls>"
TO_WEATHER = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
HARMONY = TO_WEATHER + CITY
TURN = "<|start|>assistant"
LLAMA = f'{{"name": "get_weather", "parameters": {CITY}}}'
ENTRY = f'{{"name": "get_weather", "arguments": {CITY}}}'

PYTHON = "[get_weather(city='Ulm', days=2)]"
LFM = f"<|tool_call_start|>{PYTHON}<|tool_call_end|>"
GEMMA = '<|tool_call>call:get_weather{city:<|"|>Ulm<|"|>,days:2}<tool_call|>'

ONE = [("get_weather", CITY)]
SPACED = '{"text": "\\n a\\n"}'
# format, output, content, calls
GOLDEN: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    ("hermes", HERMES, "", ONE),
    ("hermes", f"Let me see.\n{HERMES}\n{HERMES}\n", "Let me see.", ONE * 2),
    ("hermes", f"One: {HERMES}\nTwo: {HERMES} Three.\n", "One:\nTwo: Three.\n", ONE * 2),
    ("hermes", f'<tool_call>{{"name":"save","arguments":{BRACES}}}</tool_call>', "", [("save", BRACES)]),
    ("hermes", f'<tool_call>\n{{"arguments": {CITY}, "name": "get_weather"}}\n</tool_call>', "", ONE),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>', "", [("now", "{}")]),
    ("glm45", f"Yes.\n{GLM}\n{GLM}", "Yes.", ONE * 2),
    ("glm45", "<tool_call>now\n</tool_call>", "", [("now", "{}")]),
    ("longcat", f"Yes.{longcat(HERMES)}{longcat(HERMES)}", "Yes.", ONE * 2),
    ("longcat_xml", f"{longcat(GLM)}\n{longcat(GLM)}", "", ONE * 2),
    ("qwen3_coder", f"{CODER}\n{CODER}", "", ONE * 2),
    ("qwen3_coder", CODER.removeprefix("<tool_call>\n"), "", ONE),
    ("qwen3_coder", "<tool_call>\n<function=now>\n</function>\n</tool_call>", "", [("now", "{}")]),
    ("mimo", f"{MIMO}\n{MIMO}", "", ONE * 2),
    ("mimo", "<tool_call>\n<function=save>\n<parameter=text>\n a\n</parameter>\n</function>\n</tool_call>", "", [("save", SPACED)]),
    ("minimax_m2", f"Hm.\n{MINIMAX}\n{INVOKE}\n{INVOKE}\n{MINIMAX_END}", "Hm.", ONE * 2),
    ("minimax_m2", f'{MINIMAX}\n<invoke name="now">\n</invoke>\n{MINIMAX_END}', "", [("now", "{}")]),
    ("minimax_m2", f"An {INVOKE} is no call", f"An {INVOKE} is no call", []),
    ("deepseek_v3", f"Hm.{BEGIN}{V3_CALL}\n{V3_CALL}{END}", "Hm.", ONE * 2),
    ("deepseek_v3", f"{BEGIN}{V31_CALL}{V31_CALL}{END}", "", ONE * 2),
    ("deepseek_v31", f"{BEGIN}{V31_CALL}{V31_CALL}{END}", "", ONE * 2),
    ("deepseek_v4", f"Hm.\n\n<｜DSML｜tool_calls>\n{DSML}\n{DSML}\n</｜DSML｜tool_calls>", "Hm.", ONE * 2),
    ("deepseek_v32", f"Hm.\n\n{CALLS}\n{DSML}\n{DSML}\n{CALLS_END}", "Hm.", ONE * 2),
    ("deepseek_v32", f'{CALLS}\n<｜DSML｜invoke name="now">\n\n</｜DSML｜invoke>\n{CALLS_END}', "", [("now", "{}")]),
    ("openai", HARMONY, "", ONE),
    ("openai", f"{HARMONY}<|call|>{TURN}{HARMONY}<|call|>", "", ONE * 2),
    ("openai", "<|channel|>commentary to=functions.now<|message|><|call|>", "", [("now", "{}")]),
    ("llama3_json", LLAMA, "", ONE),
    ("llama3_json", f"<|python_tag|>{LLAMA}; {LLAMA}", "", ONE * 2),
    ("llama3_json", '{"name": "Bob", "parameters": {}} is {no} call', '{"name": "Bob", "parameters": {}} is {no} call', []),
    ("granite4", f"{HERMES}\n{HERMES}", "", ONE * 2),
    ("pythonic", PYTHON, "", ONE),
    ("pythonic", f"Yes.\n<|python_start|>{PYTHON[:-1]}, now()]<|python_end|>", "Yes.", [*ONE, ("now", "{}")]),
    ("pythonic", "[1, 2] and [now](x) and [other(a=1)]", "[1, 2] and [now](x) and [other(a=1)]", []),
    (
        "pythonic",
        """[save(text="it's", tags=('a', None), limit=-1.5)]""",
        "",
        [("save", '{"text": "it\'s", "tags": ["a", null], "limit": -1.5}')],
    ),
    ("lfm2", f"{LFM} The weather", " The weather", ONE),
    ("lfm2", f"<|tool_call_start|>[{ENTRY}, {ENTRY}]<|tool_call_end|>", "", ONE * 2),
    ("gemma4", f"Hm.\n{GEMMA}{GEMMA}", "Hm.", ONE * 2),
    ("gemma4", "<|tool_call>call:now{}<tool_call|>", "", [("now", "{}")]),
    (
        "gemma4",
        '<|tool_call>call:save{tags:[],text:<|"|>a "b"}\n<|"|>,<|"|>a:b<|"|>:{x:[null,true,{y:-1.5}]}}<tool_call|>',
        "",
        [("save", '{"tags": [], "text": "a \\"b\\"}\\n", "a:b": {"x": [null, true, {"y": -1.5}]}}')],
    ),
    ("mistral", f"[TOOL_CALLS] [{ENTRY}, {ENTRY}]", "", ONE * 2),
    ("mistral", f"So.[TOOL_CALLS]get_weather[ARGS]{CITY}[TOOL_CALLS]get_weather{CITY}", "So.", ONE * 2),
    ("mistral", f"[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{CITY}", "", ONE),
]


@pytest.mark.parametrize(("format", "text", "content", "calls"), GOLDEN)
def test_golden(format: str, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    for pieces in ([text], list(text)):
        found = parse(pieces, format)
        assert (found.content, found.calls, found.raw) == (content, calls, text)


NOW = '{"name": "now", "arguments": {}}'
BOTH = [*ONE, ("now", "{}")]
QUOTED = '{"name": "get_weather", "arguments": "{\\"city\\": \\"Ulm\\"}"}'
WRAPPED = '{"type": "function", "function": {"name": "get_weather", "parameters": {"city": "Ulm"}}}'
ULM = [("get_weather", '{"city": "Ulm"}')]
OPEN = "<tool_call>\n<function=get_weather>\n<parameter=city>\n"
BARE = f"{BEGIN}<｜tool▁call▁begin｜>function<｜tool▁sep｜>"
# As models write at times, though no template does.
VARIANTS: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    ("gemma4", "<|tool_call> call: get_weather {city: Ulm , days : None}", "", [("get_weather", '{"city": "Ulm", "days": null}')]),
    ("hermes", f"<tool_call>{ENTRY}\n{NOW}\n</tool_call>", "", BOTH),
    ("hermes", f"<tool_call>\n[{ENTRY}, {NOW}]\n</tool_call>", "", BOTH),
    ("hermes", f"<tool_call>{ENTRY}}}\n</tool_call>", "", ONE),
    ("hermes", f"<tool_call>{QUOTED}</tool_call>", "", ULM),
    ("hermes", f"<tool_call>{WRAPPED}</tool_call>", "", ULM),
    ("hermes", f"<tool_call>{NOW.replace('{}', 'null')}</tool_call>", "", [("now", "{}")]),
    ("llama3_json", f"[{LLAMA}, {NOW}]", "", BOTH),
    ("llama3_json", f"{LLAMA}, {NOW}\n{LLAMA}", "", [*BOTH, *ONE]),
    ("llama3_json", '{"parameters": {"city": "Ulm"}, "name": "get_weather"}', "", ULM),
    ("llama3_json", f"So: {WRAPPED}", "So:", ULM),
    ("llama3_json", QUOTED, "", ULM),
    ("llama3_json", f"see [1], {LLAMA}; or {{not}}", "see [1],; or {not}", ONE),
    ("pythonic", "[get_weather(city=Ulm, days=true),\n now( )\n]", "", [("get_weather", '{"city": "Ulm", "days": true}'), ("now", "{}")]),
    (
        "pythonic",
        """[save(text='a\nb', tags=["\\d"], place={'x': {1: 0x10}},)]""",
        "",
        [("save", '{"text": "a\\nb", "tags": ["\\\\d"], "place": {"x": {"1": 16}}}')],
    ),
    (
        "pythonic",
        "[save(text='''a\n\"b\"''', tags=f(1), limit=1e999)]",
        "",
        [("save", '{"text": "a\\n\\"b\\"", "tags": "f(1)", "limit": 1e999}')],
    ),
    ("pythonic", PYTHON * 2, "", ONE * 2),
    ("pythonic", "[save(text='''a\\''''+)]", "", [("save", "{\"text\": \"'''a\\\\''''+\"}")]),
    ("lfm2", LFM * 2, "", ONE * 2),
    ("lfm2", LFM.replace("[", "").replace("]", ""), "", ONE),
    ("mistral", f"[TOOL_CALLS] {ENTRY}", "", ONE),
    ("mistral", '[TOOL_CALLS][{"arguments": {"city": "Ulm"}, "name": "get_weather"}]', "", ULM),
    ("qwen3_coder", f"{OPEN}Ulm\n<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>", "", ONE),
    ("qwen3_coder", f"{OPEN}Ulm\n</function>\n</tool_call>", "", ULM),
    ("qwen3_coder", f"{OPEN}Ulm</parameter></tool_call>", "", ULM),
    ("qwen3_coder", f"{OPEN}Ulm\n</parameter>\n</function>\n<function=now>\n</function>\n</tool_call>", "", [*ULM, ("now", "{}")]),
    ("mimo", MIMO.replace("Ulm</parameter>", "Ulm"), "", ONE),
    ("mimo", MIMO.replace("2</parameter>", "2"), "", ONE),
    ("glm45", GLM.replace("\n", ""), "", ONE),
    ("glm45", f"{GLM.removesuffix('</tool_call>')}<tool_call>now</tool_call>", "", BOTH),
    ("deepseek_v3", f"{BARE}get_weather\n{CITY}<｜tool▁call▁end｜>{END}", "", ONE),
    ("deepseek_v3", f"{BARE}get_weather\n```json\n{CITY}\n<｜tool▁call▁end｜>{END}", "", ONE),
    ("deepseek_v3", f"{BARE}now\n```json\n\n```<｜tool▁call▁end｜>{END}", "", [("now", "{}")]),
    ("deepseek_v31", f"{BEGIN}<｜tool▁call▁begin｜>now<｜tool▁sep｜><｜tool▁call▁end｜>{END}", "", [("now", "{}")]),
    ("deepseek_v31", V31_CALL, "", ONE),
    ("deepseek_v32", f'{CALLS}<｜DSML｜invoke name="get_weather">\n{CITY}\n</｜DSML｜invoke>{CALLS_END}', "", ONE),
    ("deepseek_v32", f"{DSML}\n{DSML}", "", ONE * 2),
    ("deepseek_v32", f"{CALLS}\n{DSML.removesuffix('</｜DSML｜invoke>')}{CALLS_END}", "", ONE),
    ("deepseek_v32", DSML.replace(' string="true"', "").replace(' string="false"', ""), "", ONE),
    ("openai", f"<|channel|>commentary to=get_weather<|message|>{CITY}<|end|>", "", ONE),
]


@pytest.mark.parametrize(("format", "text", "content", "calls"), VARIANTS)
def test_variants(format: str, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    for pieces in ([text], list(text)):
        found = parse(pieces, format)
        assert (found.content, found.calls, found.raw) == (content, calls, text)


# What is no call stays content, with what stood around it; what follows is looked at again.
MALFORMED = [
    ("hermes", "a <tool_call>\nget_weather\n</tool_call> b"),
    ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "now", "arguments": "text"}</tool_call>'),
    ("hermes", '<tool_call>\n{"name": "get_'),
    ("hermes", '<tool_call>{"name": "now", "arguments": "[1]"}</tool_call>'),
    ("hermes", "an unfinished <tool_c"),
    ("llama3_json", '{"parameters": {"city": "Ulm"}, "name": "Bob"}'),
    ("llama3_json", '[{"name": "Bob"}]'),
    ("mistral", '[TOOL_CALLS] {"city": "Ulm"}'),
    ("glm45", "<tool_call>not a call</tool_call>"),
    ("qwen3_coder", "<tool_call>\n{}\n</tool_call>\n<function>"),
    ("deepseek_v3", f"{BEGIN}<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\nplain{END}"),
    ("llama3_json", '{"city": "Ulm", "name": "now"}'),
    ("mistral", "[TOOL_CALLS] nothing"),
    ("mistral", "[TOOL_CALLS][]"),
    ("deepseek_v32", f"{CALLS}\n{{}}{CALLS_END}"),
    ("deepseek_v32", "see <｜DSML｜invoke name=>"),
    ("openai", "an unfinished <|channel|>commentary to=functions.now"),
    ("openai", "<|channel|>commentary to=python code<|message|>1 + 1"),
]


@pytest.mark.parametrize(("format", "text"), MALFORMED)
def test_what_is_no_call_is_content(format: str, text: str) -> None:
    found = parse([text], format)
    assert (found.content, found.calls) == (text, [])


def test_a_sound_call_behind_a_malformed_one() -> None:
    found = parse([f"<tool_call>oops</tool_call>\n{HERMES}"], "hermes")
    assert (found.content, found.calls) == ("<tool_call>oops</tool_call>", ONE)


@pytest.mark.parametrize("format", ["hermes", "glm45", "qwen3_coder", "deepseek_v3", "deepseek_v32", "openai", "llama3_json", "mistral"])
def test_a_call_that_ends_in_its_middle_keeps_what_came(format: str) -> None:
    whole = {"hermes": HERMES, "glm45": GLM, "qwen3_coder": CODER, "deepseek_v3": BEGIN + V3_CALL, "llama3_json": LLAMA}
    whole |= {"deepseek_v32": CALLS + DSML, "openai": HARMONY}
    text = whole.get(format, f"[TOOL_CALLS][{ENTRY}]")
    text = text[: text.index("lm") + 1]
    found = parse([text], format)
    assert found.calls == [("get_weather", '{"city": "Ul')] and found.raw == text


def test_broken_arguments_end_at_the_end_tag() -> None:
    found = parse(['<tool_call>{"name": "now", "arguments": {"a": [1}</tool_call> and on'], "hermes")
    assert (found.content, found.calls) == (" and on", [("now", '{"a": [1}')])


def test_a_missing_end_tag_swallows_nothing() -> None:
    found = parse([HERMES.removesuffix("\n</tool_call>") + "\nThere."], "hermes")
    assert (found.content, found.calls) == ("\nThere.", ONE)


VALUES = [
    ("text", "12", '"12"'),
    ("text", 'say "hi"\n\\ ü', '"say \\"hi\\"\\n\\\\ ü"'),
    ("tags", '["a", "b"]', '["a", "b"]'),
    ("tags", "not JSON", '"not JSON"'),
    ("limit", "None", "null"),
    ("limit", "3", "3"),
    ("limit", "1e400", "1e400"),
    ("limit", "NaN", '"NaN"'),
    ("place", '{"x": 1}', '{"x": 1}'),
    ("unknown", "true", "true"),
    ("unknown", '"quoted"', '"\\"quoted\\""'),
    ("tags", "[" * 100_000, None),
    ("limit", "1" * 5000, None),
]


@pytest.mark.parametrize(("key", "written", "value"), VALUES, ids=lambda value: str(value)[:20])
def test_tagged_values_have_the_types_of_the_schema(key: str, written: str, value: str | None) -> None:
    value = json.dumps(written) if value is None else value
    glm = f"<tool_call>save\n<arg_key>{key}</arg_key>\n<arg_value>{written}</arg_value>\n</tool_call>"
    coder = f"<tool_call>\n<function=save>\n<parameter={key}>\n{written}\n</parameter>\n</function>\n</tool_call>"
    for format, text in (("glm45", glm), ("qwen3_coder", coder)):
        assert parse([text], format).calls == [("save", f'{{"{key}": {value}}}')]


ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
THINKS, PREAMBLE = f"{ANALYSIS}a <b>\n<|end|>", "<|channel|>commentary<|message|>I look.<|end|>"
# Messages as gpt-oss writes them, and as it should not.
MESSAGES: list[tuple[Opening, str, str, str, int]] = [
    (Opening.MAYBE, f"{THINKS}{TURN}{FINAL}b\n", "a <b>\n", "b\n", 0),
    (Opening.MAYBE, f"{THINKS}{TURN}{HARMONY}", "a <b>\n", "", 1),
    (Opening.MAYBE, f"{THINKS}{TURN}{PREAMBLE}{TURN}{THINKS}{TURN}{HARMONY}<|call|>", "a <b>\n" * 2, "I look.", 1),
    (Opening.MAYBE, f" to=functions.get_weather<|channel|>commentary json<|message|>{CITY}", "", "", 1),
    (Opening.MAYBE, f"{ANALYSIS[:-11]} to=functions.get_weather code<|message|>{CITY}{TURN}{FINAL}b", "", "b", 1),
    (Opening.MAYBE, f"{ANALYSIS}a{FINAL}b", "a", "b", 0),  # no ends
    (Opening.MAYBE, f"{FINAL}b<|return|>", "", "b", 0),
    (Opening.MAYBE, "<|channel|>commentary to=python code<|message|>1 + 1", "", "1 + 1", 0),
    (Opening.MAYBE, "plain <|chan", "", "plain <|chan", 0),
    (Opening.MAYBE, f"<|start|>{'x' * 300}<|message|>", "", f"<|start|>{'x' * 300}<|message|>", 0),
    (Opening.INSIDE, f"a<|end|>{TURN}{FINAL}b", "a", "b", 0),
    (Opening.NONE, "b <|", "", "b <|", 0),
]


@pytest.mark.parametrize(("opening", "text", "reasoning", "content", "calls"), MESSAGES)
def test_channels(opening: Opening, text: str, reasoning: str, content: str, calls: int) -> None:
    for pieces in ([text], list(text)):
        found = parse(pieces, "openai", "openai_gptoss", opening)
        assert (found.reasoning, found.content, found.calls, found.raw) == (reasoning, content, ONE * calls, text)
        assert parse(pieces, None, "openai_gptoss", opening).raw == text


def test_a_call_of_a_tool_that_nobody_offers_is_content() -> None:
    assert parse([HARMONY], None, "openai_gptoss").content == CITY


def test_tokens_of_all_messages_on_analysis_are_reasoning() -> None:
    for opening, text, counted in (
        (Opening.MAYBE, f"{THINKS}{TURN}{PREAMBLE}{TURN}{THINKS}{TURN}{FINAL}b", f"{THINKS}{TURN}{THINKS}"),
        (Opening.MAYBE, f"{FINAL}b<|end|>", ""),
        (Opening.INSIDE, f"a<|end|>{TURN}{THINKS}{TURN}{HARMONY}", f"a<|end|>{TURN}{THINKS}"),
        (Opening.NONE, f"b<|end|>{TURN}{THINKS}", TURN + THINKS),
    ):
        counter = ReasoningCount(REASONINGS.get("gpt-oss"), opening)
        assert sum(map(counter.add, text)) == len(counted)


def test_channels_that_are_not_separated_are_content() -> None:
    text = f"{THINKS}{TURN}{HARMONY}"
    reading = parser("openai", "openai_gptoss", separate_reasoning=False)
    found = put_together([*reading.feed(text), *reading.finish()])
    assert (found.reasoning, found.content, found.calls) == ("", f"{THINKS}", ONE)


@pytest.mark.parametrize(("prompt", "opening"), [
    (f"<|end|>{TURN}", Opening.MAYBE),
    ("<|start|>user<|message|>a<|end|>", Opening.MAYBE),
    (TURN + ANALYSIS, Opening.INSIDE),
    (TURN + FINAL, Opening.NONE),
])  # fmt: skip
def test_the_prompts_end_says_which_message_is_open(prompt: str, opening: Opening) -> None:
    assert REASONINGS.get("gpt-oss").opening(prompt) is opening


def test_calls_follow_an_answer_in_tags() -> None:
    text = f"a\n</think>\n\n<response>\nb\n</response>\n\n{HERMES}\n"
    for pieces in ([text], list(text)):
        found = parse(pieces, "ernie45", "ernie45", Opening.INSIDE)
        assert (found.reasoning, found.content, found.calls, found.raw) == ("a", "b", ONE, text)


def test_reasoning_that_is_not_separated_is_content_and_calls_are_found_behind_it_alone() -> None:
    text = f"<think>\n{HERMES}\n</think>\n\nSo: "
    reading = parser("hermes", "qwen3", separate_reasoning=False)
    events = [*reading.feed(text + HERMES), *reading.finish()]
    assert "".join(event.text for event in events if isinstance(event, Content)) == text.rstrip()
    assert len([event for event in events if isinstance(event, CallBegin)]) == 1


def test_pieces_come_as_early_as_they_can() -> None:
    def fed(format: str, *pieces: str) -> list[object]:
        reading = parser(format, "qwen3")
        return [[event for event in reading.feed(piece) if isinstance(event, Content | Reasoning | Arguments)] for piece in pieces]

    assert fed("hermes", "a <to", "od", "<think>") == [[Content("a")], [Content(" <tood")], [Content("<think>")]]
    assert fed("hermes", "<think>a", "b</t", "c") == [[Reasoning("a")], [Reasoning("b")], [Reasoning("</tc")]]
    begun = '<tool_call>{"name": "save", "arguments": {"te'
    assert fed("hermes", begun, 'xt": "x') == [[Arguments(0, '{"te')], [Arguments(0, 'xt": "x')]]
    tagged = "<tool_call>save\n<arg_key>text</arg_key>\n<arg_value>"
    pieces = [Arguments(0, '{"text": "'), Arguments(0, "a")], [Arguments(0, "\\n")]
    assert fed("glm45", tagged + "a", "\n") == list(pieces)


def test_a_value_of_no_type_that_the_schema_has_is_a_string() -> None:
    text = "<tool_call>save\n<arg_key>limit</arg_key>\n<arg_value>[1]</arg_value>\n</tool_call>"
    assert parse([text], "glm45").calls == [("save", '{"limit": "[1]"}')]


def test_an_end_tag_inside_a_value_is_a_part_of_it() -> None:
    glm = "<tool_call>save\n<arg_key>text</arg_key>\n<arg_value>a</arg_value>\nb</arg_value>\n</tool_call>"
    coder = "<tool_call>\n<function=save>\n<parameter=text>\na</parameter> b\n</parameter>\n</function>\n</tool_call>"
    assert parse([glm], "glm45").calls == [("save", '{"text": "a</arg_value>\\nb"}')]
    assert parse([coder], "qwen3_coder").calls == [("save", '{"text": "a</parameter> b"}')]
