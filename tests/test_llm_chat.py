"""`LLM.chat`, as vLLM's: conversations through the model's chat template, in the same engine as `generate`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mtpserve.core.errors import InvalidRequest
from mtpserve.core.sampling import SamplingParams
from mtpserve.llm import LLM, REFUSED
from tests.models.checkpoints import mimo
from tests.text import tiny

TEMPLATE = (
    "{% for tool in tools or [] %}<tool>{{ tool.function.name }}{% endfor %}{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}({{ call.function.arguments.path }}){% endfor %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant{{ '' if enable_thinking is false else ' thinks' }}:{% endif %}"
)
SAMPLING = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
USER = {"role": "user", "content": "def read_lines"}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    directory = tmp_path_factory.mktemp("model")
    mimo(directory, vocab_size=tiny.VOCAB, max_position_embeddings=512)
    tiny.write(directory, TEMPLATE)
    with LLM(str(directory), dtype="float32", max_total_tokens=2048, max_running_requests=4) as made:
        yield made


def prompted(llm: LLM, text: str) -> list[int]:
    (completion,) = llm.generate([llm.tokenizer.encode(text, special=False)], SAMPLING)
    return completion.tokens


@pytest.mark.parametrize(
    ("messages", "options", "prompt"),
    [
        ([USER], {}, "user: def read_lines\nassistant thinks:"),
        ([USER], {"chat_template_kwargs": {"enable_thinking": False}}, "user: def read_lines\nassistant:"),
        ([USER], {"add_generation_prompt": False}, "user: def read_lines\n"),
        ([USER], {"tools": [TOOL]}, "<tool>readuser: def read_lines\nassistant thinks:"),
        ([{"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, USER], {},
         "system: a\nb\nuser: def read_lines\nassistant thinks:"),
        ([USER, {"role": "assistant", "content": None, "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "read", "arguments": '{"path": "x"}'}}]},
          {"role": "tool", "tool_call_id": "1", "content": "text"}], {},
         "user: def read_lines\nassistant: read(x)\ntool: text\nassistant thinks:"),
        ([USER, {"role": "assistant", "content": "(pa"}], {"add_generation_prompt": False, "continue_final_message": True},
         "user: def read_lines\nassistant: (pa"),
    ],
)  # fmt: skip
def test_the_template_writes_the_prompt(llm: LLM, messages: list[dict[str, Any]], options: dict[str, Any], prompt: str) -> None:
    (completion,) = llm.chat(messages, SAMPLING, **options)
    assert completion.prompt_tokens == len(llm.tokenizer.encode(prompt, special=False))
    assert completion.tokens == prompted(llm, prompt)


def test_a_list_of_conversations_gives_a_completion_for_each(llm: LLM) -> None:
    ended: list[int] = []
    other = {"role": "user", "content": "the end of the line"}
    found = llm.chat(
        [[USER], [other, {"role": "assistant", "content": "of"}, USER]], [SAMPLING, SamplingParams(max_tokens=2)], progress=ended.append
    )
    assert [len(completion.tokens) for completion in found] == [4, 2] and ended == [1, 2]
    assert found[0].tokens == llm.chat([USER], sampling_params=SAMPLING)[0].tokens


def test_programs_for_vllm_read_the_same_names(llm: LLM) -> None:
    (output,) = llm.generate(["def"], sampling_params=SAMPLING)
    assert output.outputs[0].text == output.text and output.outputs[0].token_ids == output.tokens
    with pytest.raises(InvalidRequest, match="give sampling or sampling_params, not both"):
        llm.generate(["def"], SAMPLING, sampling_params=SAMPLING)


@pytest.mark.parametrize(
    ("messages", "options", "words"),
    [
        ([], {}, r"messages must have at least one message, got \[\]"),
        ([USER | {"role": "robot"}], {}, r"messages\[0\].role must be one of system, developer, user, assistant, tool, got 'robot'"),
        ([[USER, "text"]], {}, r"messages\[1\] must be a dict with role and content, got 'text'"),
        ([USER | {"content": 5}], {}, r"messages\[0\].content must be a text or a list of parts, got 5"),
        ([USER | {"content": [{"type": "image_url"}]}], {}, "parts of type 'image_url' are not supported, only text is"),
        ([USER | {"tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}], {}, r"\[0\].function.arguments must be JSON, got '{'"),
        ([USER], {"continue_final_message": True}, "continue_final_message needs add_generation_prompt=False"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(llm: LLM, messages: list[Any], options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        llm.chat(messages, SAMPLING, **options)
    assert not llm.engine.has_work


def test_a_model_without_a_template_or_with_one_without_tools(tmp_path: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm.tokenizer._tokenizer, "chat_template", "{{ messages[0].content }}")
    with pytest.raises(InvalidRequest, match="tools: the model's chat template has no place for them"):
        llm.chat([USER], SAMPLING, tools=[TOOL])
    monkeypatch.setattr(llm.tokenizer._tokenizer, "chat_template", None)
    with pytest.raises(InvalidRequest, match=r"^this model has no chat template: use generate$"):
        llm.chat([USER], SAMPLING)


@pytest.mark.parametrize("name", REFUSED)
def test_what_vllm_has_beside_is_refused_with_the_reason(llm: LLM, name: str) -> None:
    with pytest.raises(AttributeError, match=f"^LLM has no '{name}': "):
        getattr(llm, name)
    assert not hasattr(llm, "other")
