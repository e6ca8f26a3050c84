"""The format in which the served model writes tool calls and reasoning: the options say it, or else its chat
template, its vocabulary and its family.

A template that renders calls shows the format of its model's own, whatever the family: checkpoints of one
architecture differ.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from mtpserve.config import ServerConfig
from mtpserve.config.server import AUTO, NONE
from mtpserve.core.errors import ConfigError, InvalidRequest
from mtpserve.core.request import ModelCard
from mtpserve.server.chat.template_needs import KINDS, NAME, USER, Message, calling
from mtpserve.text.chat_sampling import ChatSampling
from mtpserve.text.parsers.reasoning import ALWAYS, SOMETIMES
from mtpserve.text.parsers.registry import REASONINGS, TOOL_CALLS
from mtpserve.text.parsers.tools import ALL, MORE
from mtpserve.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

VALUE = "value"  # the argument "key" has it in a call that a template renders, as in the formats' examples
# reasoning parsers by what they expect, where no family has its own
ALWAYS_REASONS, MAY_REASON = "deepseek_r1", "deepseek_v3"
SWITCHES = ("enable_thinking", "thinking")  # variables by which templates turn reasoning on and off


@dataclass(frozen=True, slots=True)
class Formats:
    """The names of text/parsers/registry for tool calls and reasoning; None: neither is parsed."""

    tool_calls: str | None = None
    reasoning: str | None = None


def formats_of(
    config: ServerConfig, card: ModelCard, tokenizer: Tokenizer, sampling: ChatSampling | None = None
) -> Formats:
    """Renders the chat template where an option is auto, and logs what was chosen, with `sampling`. Raises
    ConfigError."""
    calls, reasoning = config.tool_call_parser, config.reasoning_parser
    calls_found = calls_format(card.tool_call_parser, tokenizer) if calls == AUTO else parser_name(calls)
    family = card.reasoning_parser if fit(card.reasoning_parser, calls_found) else None
    formats = Formats(
        calls_found, reasoning_format(family, tokenizer) if reasoning == AUTO else parser_name(reasoning)
    )
    if not fit(formats.reasoning, formats.tool_calls):
        raise ConfigError(
            f"--reasoning-parser {formats.reasoning} does not go with --tool-call-parser {formats.tool_calls}"
        )
    log.info(
        "tool calls: %s; reasoning: %s%s",
        describe_format(calls, formats.tool_calls, "--tool-call-parser"),
        describe_format(reasoning, formats.reasoning, "--reasoning-parser"),
        "" if sampling is None else f"; chats: {sampling}",
    )
    return formats


def fit(reasoning: str | None, calls: str | None) -> bool:
    """False where the reasoning's format has calls of its own, and `calls` are others."""
    tool_calls = None if reasoning is None else REASONINGS.get(reasoning).calls
    return tool_calls is None or calls is None or TOOL_CALLS.get(calls) is TOOL_CALLS.get(tool_calls)


def parser_name(option: str) -> str | None:
    return None if option == NONE else option


def describe_format(option: str, name: str | None, flag: str) -> str:
    if option == AUTO and name is None:
        return f"off, as neither the chat template nor the model family names a format (set {flag})"
    return name or "off"


def calls_format(family: str | None, tokenizer: Tokenizer) -> str | None:
    """Returns the format in which the template renders a call. Otherwise returns the family's format, if the
    vocabulary has the token with which its calls begin."""
    texts = [render_or_empty(tokenizer, kind.adapt_messages([USER, *calling(VALUE)], "")) for kind in KINDS]
    call_texts = [text for text in texts if NAME in text]
    if call_texts:
        return next((format for text in call_texts if (format := layout_of(text)) is not None), None)
    if family is None:
        return None
    format_class = TOOL_CALLS.get(family)
    return (
        family if tokenizer.marker_id((format_class.tokens or format_class.markers)[0]) is not None else None
    )


def layout_of(text: str) -> str | None:
    """The format of whose example the call in the text is a copy; up to blanks if there is none."""
    formats = {name: TOOL_CALLS.get(name) for name in TOOL_CALLS.entries}
    examples = [
        (name, sample(example))
        for name, format in formats.items()
        for example in (format.example, *format.layouts)
    ]
    exact = (name for name, call in examples if call in text)
    alike = (name for name, call in examples if squeezed(call) in squeezed(text))
    return next(exact, None) or next(alike, None)


def sample(example: str) -> str:
    """The example as a call of the template's tool; up to its arguments, after which some templates add
    fields."""
    head, arguments, _ = example.replace(MORE, "").replace("tool_call_name", NAME).partition(ALL)
    return f'{head}{{"key": "{VALUE}"' if arguments else head


def squeezed(text: str) -> str:
    return "".join(text.split())


def reasoning_format(family: str | None, tokenizer: Tokenizer) -> str | None:
    """Returns the format for models that always reason, if the template always opens the reasoning. Otherwise
    returns the family's, which may find none."""
    opened = render_or_empty(tokenizer, [USER]).rstrip().endswith(ALWAYS.start)
    plain = family is None or REASONINGS.get(family) == SOMETIMES
    if opened and plain and not any(map(tokenizer.template_takes, SWITCHES)):
        return ALWAYS_REASONS
    return family or (MAY_REASON if tokenizer.template_mentions(ALWAYS.end) else None)


def render_or_empty(tokenizer: Tokenizer, messages: list[Message]) -> str:
    """Empty if the template refuses the messages, or if there is none."""
    try:
        return tokenizer.render_chat(messages).text
    except InvalidRequest:
        return ""
