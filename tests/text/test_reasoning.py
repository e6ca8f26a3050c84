"""Where reasoning begins and ends, in an output and in the prompt before it."""

from __future__ import annotations

import pytest

from mtpserve.text.parsers.reasoning import Opening
from mtpserve.text.parsers.registry import REASONINGS
from tests.text.calls import parse

THOUGHTS = [
    ("deepseek_r1", Opening.INSIDE, "<think>\na\n</think>\n\nb", "a", "b"),
    ("deepseek_r1", Opening.INSIDE, "a</think>b", "a", "b"),  # the start tag was in the prompt, or is missing
    ("deepseek_r1", Opening.INSIDE, "a </thin b", "a </thin b", ""),  # no end tag
    ("qwen3", Opening.MAYBE, "\n<think>a</think>\nb", "a", "b"),
    ("qwen3", Opening.MAYBE, "a</think>b", "", "a</think>b"),
    ("qwen3", Opening.NONE, "<think>a</think>b", "", "<think>a</think>b"),
    ("glm45", Opening.MAYBE, "\n<think></think>\nb <think>c</think>", "", "b <think>c</think>"),
    ("qwen3", Opening.INSIDE, "see <tool_call> or {</think>b", "see <tool_call> or {", "b"),
    ("gemma4", Opening.MAYBE, "<|channel>thought\na\n<channel|>b", "a", "b"),
    ("gemma4", Opening.NONE, "b", "", "b"),
    ("longcat", Opening.MAYBE, "<longcat_think>\na </think>\n</longcat_think>\nb", "a </think>", "b"),
    ("ernie45", Opening.INSIDE, "a\n</think>\n\n<response>\nb\n</response>\n", "a", "b"),
    ("ernie45", Opening.INSIDE, "a</think>\n<response><response>b</response> c </response>", "a", "<response>b</response> c"),
    ("ernie45", Opening.INSIDE, "a</think>b</response>", "a", "b</response>"),
    ("ernie45", Opening.NONE, "b\n</response>\n", "", "b"),
    ("ernie45", Opening.MAYBE, "<response>b</response>", "", "<response>b</response>"),
    ("longcat", Opening.INSIDE, "a</longcat_think>b", "a", "b"),
]


@pytest.mark.parametrize(("name", "opening", "text", "reasoning", "content"), THOUGHTS)
def test_reasoning(name: str, opening: Opening, text: str, reasoning: str, content: str) -> None:
    for pieces in ([text], list(text)):
        found = parse(pieces, "hermes", name, opening)
        assert (found.reasoning, found.content, found.raw) == (reasoning, content, text)


@pytest.mark.parametrize(("prompt", "hybrid", "reasoner"), [
    ("<|im_start|>assistant\n", Opening.MAYBE, Opening.INSIDE),
    ("<|im_start|>assistant\n<think>\n", Opening.INSIDE, Opening.INSIDE),
    ("<|im_start|>assistant\n<think>\n\n</think>\n\n", Opening.NONE, Opening.NONE),
    ("<｜Assistant｜></think>", Opening.NONE, Opening.NONE),
    ("<think>a</think>b<|user|>c<|assistant|>", Opening.MAYBE, Opening.INSIDE),
    ("<｜tool▁output▁begin｜>7<｜tool▁output▁end｜><｜tool▁outputs▁end｜>", Opening.MAYBE, Opening.MAYBE),
])  # fmt: skip
def test_the_prompts_end_says_where_reasoning_begins(prompt: str, hybrid: Opening, reasoner: Opening) -> None:
    assert REASONINGS.get("qwen3").opening(prompt) is hybrid and REASONINGS.get("deepseek_r1").opening(prompt) is reasoner
