"""Which parsers `auto` chooses: by templates as families' checkpoints have them, shortened to what they write of calls and reasoning."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from mtpserve.config import ServerConfig
from mtpserve.core.errors import ConfigError
from mtpserve.models.registry import FAMILIES
from mtpserve.server.app import create_app
from mtpserve.server.chat.formats import Formats, formats_of
from mtpserve.text.parsers.registry import REASONINGS, TOOL_CALLS
from mtpserve.text.tokenizer import Tokenizer
from tests.server.fake_client import FakeClient
from tests.server.test_errors import send
from tests.server.test_template_needs import HEAD
from tests.text import tiny
from tests.text.calls import longcat

TURNS = "{% for m in messages %}{% if m.tool_calls %}%calls{% else %}{{ m.role }}: {{ %content }}{% endif %}{{ '\n' }}{% endfor %}"
EACH = "{% for c in m.tool_calls %}{% set f = c.function %}%call{% endfor %}"


def template(call: str, prompt: str = "assistant:", content: str = "m.content") -> str:
    turns = TURNS.replace("%calls", EACH.replace("%call", call) if call else "").replace("%content", content)
    return HEAD + turns + "{% if add_generation_prompt %}" + prompt + "{% endif %}"


HERMES = '<tool_call>\n{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n</tool_call>'
LLAMA = '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}'
V3_CALL = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ c.type }}<｜tool▁sep｜>{{ f.name }}\n```json\n{{ '' + f.arguments }}\n```"
V31_CALL = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ f.name }}<｜tool▁sep｜>{{ '' + f.arguments }}<｜tool▁call▁end｜>"
PAIRS = "{% for k, v in f.arguments.items() %}%pair{% endfor %}"
GLM45 = (
    "<tool_call>{{ f.name }}\n" + PAIRS.replace("%pair", "<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value>\n") + "</tool_call>"
)
GLM47 = "<tool_call>{{ f.name }}" + PAIRS.replace("%pair", "<arg_key>{{ k }}</arg_key><arg_value>{{ v }}</arg_value>") + "</tool_call>"
CODER = PAIRS.replace("%pair", "<parameter={{ k }}>\n{{ v }}\n</parameter>\n")
CODER = "<tool_call>\n<function={{ f.name }}>\n" + CODER + "</function>\n</tool_call>"
MIMO = CODER.replace("\n{{ v }}\n", "{{ v }}")
MISTRAL = '[TOOL_CALLS] [{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}, "id": "{{ c.id }}"}]'
MINIMAX = PAIRS.replace("%pair", '<parameter name="{{ k }}">{{ v }}</parameter>\n')
MINIMAX = '\n<minimax:tool_call>\n<invoke name="{{ f.name }}">\n' + MINIMAX + "</invoke>\n</minimax:tool_call>"
DSML = (
    '<｜DSML｜function_calls>\n<｜DSML｜invoke name="{{ f.name }}">\n'
    + PAIRS.replace("%pair", '<｜DSML｜parameter name="{{ k }}" string="true">{{ v }}</｜DSML｜parameter>\n')
    + "</｜DSML｜invoke>\n</｜DSML｜function_calls>"
)
HARMONY = "<|start|>assistant to=functions.{{ f.name }}<|channel|>commentary json<|message|>{{ f.arguments | tojson }}<|call|>"
AS_WRITTEN = HARMONY.replace(" to=functions.{{ f.name }}", "").replace("json<|m", "to=functions.{{ f.name }} <|constrain|>json<|m")
NEMOTRON = '<TOOLCALL>[{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}]</TOOLCALL>'
ANSWER = "m.content.split('</think>')[-1]"  # of a turn that is over
OFF = "assistant:{{ '<think></think>' if enable_thinking is false }}"
EITHER = "assistant:{{ '<think>' if thinking else '</think>' }}"

# What it is, its template, architecture, tokens that its vocabulary has besides a byte's; the parsers of calls and of reasoning.
CHECKPOINTS: list[tuple[str, str, str, tuple[str, ...], str | None, str | None]] = [
    ("Qwen2.5", template(HERMES), "Qwen2ForCausalLM", ("<tool_call>",), "hermes", None),
    ("QwQ", template(HERMES, "assistant:<think>\n"), "Qwen2ForCausalLM", (), "hermes", "deepseek_r1"),
    ("Qwen3", template(HERMES, OFF), "Qwen3ForCausalLM", ("<tool_call>",), "hermes", "qwen3"),
    ("Qwen3-Thinking", template(HERMES, "assistant:\n<think>\n"), "Qwen3MoeForCausalLM", (), "hermes", "deepseek_r1"),
    ("Qwen3-Coder", template(CODER), "Qwen3MoeForCausalLM", ("<tool_call>",), "qwen3_coder", "qwen3"),
    ("Step-3.5", template(CODER, "assistant\n<think>\n"), "Step3p5ForCausalLM", ("<tool_call>",), "qwen3_coder", "deepseek_r1"),
    ("MiniMax-M2", template(MINIMAX, "]~b]ai\n<think>\n"), "MiniMaxM2ForCausalLM", ("<think>",), "minimax_m2", "minimax_m2"),
    ("MiMo-7B", template(HERMES), "MiMoForCausalLM", (), "hermes", "mimo"),
    ("MiMo-V2's", template(MIMO), "MiMoForCausalLM", (), "mimo", "mimo"),
    ("GLM-4.5", template(GLM45, OFF), "Glm4MoeForCausalLM", ("<tool_call>",), "glm45", "glm45"),
    ("GLM-4.7", template(GLM47, OFF), "Glm4MoeForCausalLM", ("<tool_call>",), "glm47", "glm45"),
    ("GLM-4.7-Flash", template(GLM47, OFF), "Glm4MoeLiteForCausalLM", ("<tool_call>",), "glm47", "glm45"),
    ("Ling 2.0", template(HERMES), "BailingMoeV2ForCausalLM", ("<tool_call>",), "hermes", "qwen3"),
    ("Ring 2.0", template(HERMES, "assistant<think>\n"), "BailingMoeV2ForCausalLM", (), "hermes", "deepseek_r1"),
    ("LongCat-Flash", template(longcat(HERMES)), "LongcatFlashForCausalLM", (), "longcat", "longcat"),
    ("LongCat-Flash-Thinking-2601", template(longcat(GLM45)), "LongcatCausalLM", (), "longcat_xml", "longcat"),
    ("LongCat-Flash, no calls", template(""), "LongcatFlashForCausalLM", ("<longcat_tool_call>",), "longcat", "longcat"),
    ("DeepSeek-V3", template(V3_CALL), "DeepseekV3ForCausalLM", (), "deepseek_v3", None),
    ("DeepSeek-R1", template(V3_CALL, "<think>\n", ANSWER), "DeepseekV3ForCausalLM", (), "deepseek_v3", "deepseek_r1"),
    ("an early R1", template(V3_CALL, "assistant:", ANSWER), "DeepseekV3ForCausalLM", (), "deepseek_v3", "deepseek_v3"),
    ("DeepSeek-V3.1", template(V31_CALL, EITHER), "DeepseekV3ForCausalLM", (), "deepseek_v31", "deepseek_v3"),
    ("DeepSeek-V3.2-Exp", template(V31_CALL, EITHER), "DeepseekV32ForCausalLM", (), "deepseek_v31", "deepseek_v3"),
    ("DeepSeek-V3.2", template(DSML, EITHER), "DeepseekV32ForCausalLM", ("｜DSML｜",), "deepseek_v32", "deepseek_v3"),
    ("DeepSeek-V3.2 with a template without calls", template(""), "DeepseekV32ForCausalLM", ("｜DSML｜",), "deepseek_v32", "deepseek_v3"),
    ("gpt-oss", template(HARMONY, "<|start|>assistant"), "GptOssForCausalLM", ("<|start|>",), "openai", "openai_gptoss"),
    ("gpt-oss, calls as it writes them", template(AS_WRITTEN), "GptOssForCausalLM", (), "openai", "openai_gptoss"),
    ("gpt-oss with a template without calls", template(""), "GptOssForCausalLM", ("<|start|>",), "openai", "openai_gptoss"),
    ("gpt-oss, tuned to another format", template(HERMES, OFF), "GptOssForCausalLM", (), "hermes", "deepseek_v3"),
    ("Ernie 4.5", template(""), "Ernie4_5_MoeForCausalLM", (), None, "ernie45"),
    ("Ernie 4.5, thinking", template(HERMES, "assistant\n<think>\n"), "Ernie4_5_MoeForCausalLM", (), "hermes", "ernie45"),
    ("R1-Distill-Llama", template(V3_CALL, "<think>\n"), "LlamaForCausalLM", ("<|python_tag|>",), "deepseek_v3", "deepseek_r1"),
    ("Llama 3.1", template(LLAMA), "LlamaForCausalLM", ("<|python_tag|>",), "llama3_json", None),
    ("Hermes-3-Llama-3.1", template(HERMES), "LlamaForCausalLM", ("<|python_tag|>",), "hermes", None),
    ("a Llama with Mistral's", template(MISTRAL), "LlamaForCausalLM", (), "mistral", None),
    (
        "Nemotron: a format that there is no parser for",
        template(NEMOTRON, OFF),
        "LlamaForCausalLM",
        ("<|python_tag|>",),
        None,
        "deepseek_v3",
    ),
    ("Llama 3.1 with a template without calls", template(""), "LlamaForCausalLM", ("<|python_tag|>",), "llama3_json", None),
    ("SmolLM2", template(""), "LlamaForCausalLM", (), None, None),
    ("DeepSeek-V3 with a template without calls", template(""), "DeepseekV3ForCausalLM", ("<｜tool▁calls▁begin｜>",), "deepseek_v3", None),
    ("one that refuses all", "{{ raise_exception('no') }}", "Qwen3ForCausalLM", ("<tool_call>",), "hermes", "qwen3"),
]


def tokenizer(directory: Path, text: str | None, added: tuple[str, ...] = ()) -> Tokenizer:
    file = tiny.write(directory, text) / "tokenizer.json"
    content = json.loads(file.read_text())
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    content["added_tokens"] += [{"id": tiny.VOCAB + i, "content": token, **flags} for i, token in enumerate(added)]
    file.write_text(json.dumps(content))
    return Tokenizer(directory)


def client(architecture: str) -> FakeClient:
    """Of an engine that has loaded one."""
    made, family = FakeClient(), FAMILIES.get(architecture)
    made.card = replace(made.card, tool_call_parser=family.tool_call_parser, reasoning_parser=family.reasoning_parser)
    return made


@pytest.mark.parametrize(
    ("name", "text", "architecture", "added", "calls", "reasoning"), CHECKPOINTS, ids=[case[0] for case in CHECKPOINTS]
)
def test_auto(
    tmp_path: Path, name: str, text: str, architecture: str, added: tuple[str, ...], calls: str | None, reasoning: str | None
) -> None:
    found = formats_of(ServerConfig(), client(architecture).card, tokenizer(tmp_path, text, added))
    assert found == Formats(calls, reasoning)


def test_families_name_parsers_that_there_are() -> None:
    for architecture in FAMILIES.names():
        family = FAMILIES.get(architecture)
        assert family.tool_call_parser in TOOL_CALLS.entries
        assert family.reasoning_parser in {None, *REASONINGS.entries}


def test_a_name_wins_and_the_log_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mtpserve.server.chat.formats")
    read, card = tokenizer(tmp_path, template(HERMES)), client("Qwen3ForCausalLM").card
    config = ServerConfig(tool_call_parser="none", reasoning_parser="deepseek_r1")
    assert formats_of(config, card, read) == Formats(None, "deepseek_r1")
    assert formats_of(ServerConfig(), FakeClient().card, tokenizer(tmp_path, None)) == Formats()
    with pytest.raises(ConfigError, match="--reasoning-parser openai_gptoss does not go with --tool-call-parser hermes"):
        formats_of(ServerConfig(reasoning_parser="openai_gptoss"), card, read)
    said = [record.message for record in caplog.records]
    off = "off, as neither the chat template nor the model family names a format"
    assert said == [
        "tool calls: off; reasoning: deepseek_r1",
        f"tool calls: {off} (set --tool-call-parser); reasoning: {off} (set --reasoning-parser)",
    ]


@pytest.mark.parametrize(("architecture", "config", "calls", "reasoning"), [
    ("Qwen3ForCausalLM", ServerConfig(), "hermes", "qwen3"),
    ("LlamaForCausalLM", ServerConfig(), "hermes", "none"),
    ("Qwen3ForCausalLM", ServerConfig(tool_call_parser="none", reasoning_parser="none"), "none", "none"),
])  # fmt: skip
def test_what_was_chosen_is_shown(tmp_path: Path, architecture: str, config: ServerConfig, calls: str, reasoning: str) -> None:
    app = create_app(client(architecture), tokenizer(tmp_path, template(HERMES)), server_config=config)
    http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")
    info = send(http, "GET", "/server_info").json()
    assert (info["tool_call_parser"], info["reasoning_parser"]) == (calls, reasoning)
    tools = {"tools": [{"type": "function", "function": {"name": "now"}}]}
    answer = send(http, "POST", "/v1/chat/completions", json={"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, **tools})
    assert answer.status_code == (400 if calls == "none" else 200)
