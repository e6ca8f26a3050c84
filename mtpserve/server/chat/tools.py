"""Tools and reasoning in a request: what is asked for, what the model is told, what its output must and may
look like.

No HTTP layout here: every endpoint with tools reads its body into a ToolUse, and gives the output's text to
the parser it makes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

from mtpserve.config import ServerConfig
from mtpserve.core.errors import ConfigError, InvalidRequest
from mtpserve.core.sampling import MAX_GRAMMAR_BYTES, GrammarSpec, SamplingParams
from mtpserve.server.chat.constraints import apply_thinking_budget
from mtpserve.server.chat.formats import Formats
from mtpserve.server.chat.offers import Offer
from mtpserve.server.chat.schemas import check_parameters, enforceable
from mtpserve.server.http.errors import SHORT
from mtpserve.text.parsers.call_grammar import spelled_by
from mtpserve.text.parsers.formats.json_calls import Listed
from mtpserve.text.parsers.output import OutputParser
from mtpserve.text.parsers.reasoning import Opening, Thinking
from mtpserve.text.parsers.registry import REASONINGS, TOOL_CALLS
from mtpserve.text.parsers.tools import CallFormat, Spell, Tool
from mtpserve.text.requests import check_text
from mtpserve.text.tokenizer import Tokenizer

MAX_TOOLS = 4096  # OpenAI documents 128; agents that gather several servers' tools send more
NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}\Z")
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
CHOICES = ("none", "auto", "required")
ToolChoice = Literal["none", "auto", "required", "named"]
FUNCTION_FIELDS = ("name", "description", "parameters", "strict")


@dataclass(frozen=True, slots=True)
class ToolUse:
    """`choice`: none, auto, required or named. `only`: the names that may be called, one where it is named;
    None: all. `several`: more than one call in an answer is wanted."""

    definitions: list[dict[str, Any]]  # as the client gave them, without fields that nothing here knows
    tools: list[Tool]
    choice: ToolChoice = "none"
    only: frozenset[str] | None = None
    several: bool = True
    indices: list[int] = field(default_factory=list)  # in the client's list, which may have other tools

    @property
    def template_tools(self) -> list[dict[str, Any]] | None:
        """What the template is given. A model is not told of tools that it must not call, unless a grammar
        keeps it from them: then the prompt stays that of requests that allow all."""
        if self.choice == "none":
            return None
        if self.forced:
            return self.definitions
        return [
            definition
            for definition, tool in zip(self.definitions, self.tools, strict=True)
            if self.allows(tool.name)
        ]

    def allows(self, name: str) -> bool:
        return self.only is None or name in self.only

    @property
    def forced(self) -> bool:
        return self.choice in ("required", "named")


def parse_tools(
    tools: Any, choice: Any, parallel: bool | None, formats: Formats, prompt_only: bool = False
) -> ToolUse:
    """OpenAI's `tools`, `tool_choice` and `parallel_tool_calls`. `prompt_only`: nothing will be generated.
    Raises InvalidRequest that names the place."""
    functions = offered_functions(tools, choice)
    offered: dict[str, Tool] = {}  # by name
    for index, function in functions.items():
        place = f"tools[{index}].function"
        definition = tool(function, place)
        if definition.name in offered:
            raise InvalidRequest(f"{place}.name: {definition.name!r} is there twice", f"{place}.name")
        offered[definition.name] = definition
    kind, only = parse_tool_choice(choice, bool(offered))
    if not offered:
        if only is not None or kind == "required":
            raise InvalidRequest(
                f"tool_choice {kind!r} needs tools" if only is None else "tool_choice needs tools",
                "tool_choice",
            )
        return ToolUse([], [])
    for name in sorted((only or frozenset()) - offered.keys()):
        raise InvalidRequest(f"tool_choice names {name[:100]!r}, which is none of the tools", "tool_choice")
    if kind == "auto" and formats.tool_calls is None and not prompt_only:
        raise InvalidRequest(
            "tool_choice 'auto' needs to know how this model writes calls, which its chat template "
"does not show: start the server with "
            f"--tool-call-parser ({', '.join(TOOL_CALLS.names())}), or ask for 'required' or for "
f"one tool by name", "tool_choice",
        )  # fmt: skip
    definitions = [{"type": "function", "function": function} for function in functions.values()]
    several = kind != "named" and parallel is not False
    return ToolUse(definitions, list(offered.values()), kind, only, several, list(functions))


def offered_functions(tools: Any, choice: Any) -> dict[int, dict[str, Any]]:
    """The functions by their index in `tools`, with the fields that are known: clients mark tools for the
    caches of others. Raises InvalidRequest, also where `choice` demands a tool that is no function."""
    if tools is None:
        return {}
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"tools must be a list of at most {MAX_TOOLS} tools", "tools")
    offer, functions = Offer(), dict[int, dict[str, Any]]()
    for index, entry in enumerate(tools):
        place = f"tools[{index}]"
        if not isinstance(entry, dict):
            raise InvalidRequest(f"{place} must be an object, got {SHORT.repr(entry)}", place)
        if (kind := entry.get("type", "function")) != "function":
            offer.leave_out(kind, place)
            continue
        if not isinstance(function := entry.get("function"), dict):
            raise InvalidRequest(f"{place}.function must be an object", f"{place}.function")
        functions[index] = {name: function[name] for name in FUNCTION_FIELDS if name in function}
        offer.add(functions[index], place)
    demanded = choice.get("type") if isinstance(choice, dict) else None
    offer.check(demanded if isinstance(demanded, str) else None)
    return functions


def tool(function: dict[str, Any], place: str) -> Tool:
    name, description, strict = (function.get(field) for field in ("name", "description", "strict"))
    name = checked_name(name, f"{place}.name")
    if description is not None and not isinstance(description, str):
        raise InvalidRequest(
            f"{place}.description must be a string, got {type(description).__name__}", f"{place}.description"
        )
    if strict is not None and not isinstance(strict, bool):
        raise InvalidRequest(
            f"{place}.strict must be true or false, got {type(strict).__name__}", f"{place}.strict"
        )
    try:
        # Spelled out, so that half a surrogate pair is seen.
        check_text(json.dumps(function, ensure_ascii=False), place)
    except RecursionError as error:
        raise InvalidRequest(f"{place} is nested too deeply", place) from error
    parameters = function.get("parameters")
    if parameters is None:
        return Tool(name, NO_PARAMETERS)
    check_parameters(parameters, f"{place}.parameters")
    return Tool(name, parameters)


def checked_name(name: Any, place: str) -> str:
    if not isinstance(name, str) or not NAME.match(name):
        raise InvalidRequest(
            f"{place} must be 1 to 128 letters, digits and _ - . : /, got {SHORT.repr(name)}", place
        )
    return name


def parse_tool_choice(choice: Any, offered: bool) -> tuple[ToolChoice, frozenset[str] | None]:
    """The kind of choice, and the names that it allows; None: all."""
    if choice is None:
        return "auto" if offered else "none", None
    if isinstance(choice, str) and choice in CHOICES:
        return cast(Literal["none", "auto", "required"], choice), None
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "allowed_tools":
        return allowed_tools(choice)
    name = name_in(choice) if kind == "function" and "function" in choice else None
    if name is None:
        wanted = "'none', 'auto', 'required' or {'type': 'function', 'function': {'name': ...}}"
        raise InvalidRequest(f"tool_choice must be {wanted}, got {SHORT.repr(choice)}", "tool_choice")
    return "named", frozenset({name})


def allowed_tools(choice: dict[str, Any]) -> tuple[ToolChoice, frozenset[str]]:
    """A choice of several tools: chat completions have its fields in an object of its name, responses have
    them beside its type. Tools that are no functions are left out here too."""
    fields = choice.get("allowed_tools", choice)
    mode, tools = (fields.get("mode"), fields.get("tools")) if isinstance(fields, dict) else (None, None)
    names = (
        [name_in(tool) for tool in tools if tool.get("type") == "function"]
        if isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)
        else []
    )
    if mode not in ("auto", "required") or not names or None in names:
        allowed_form = "a mode, 'auto' or 'required', and tools, a list with the names of functions"
        raise InvalidRequest(
            f"tool_choice of type 'allowed_tools' must have {allowed_form}, got {SHORT.repr(choice)}",
            "tool_choice",
        )
    return cast(Literal["auto", "required"], mode), frozenset(name for name in names if name is not None)


def name_in(tool: dict[str, Any]) -> str | None:
    """The name of a function that a tool_choice refers to, in chat completions one level deeper."""
    function = tool.get("function", tool)
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def call_format(use: ToolUse, formats: Formats) -> CallFormat:
    name = formats.tool_calls or (formats.reasoning and REASONINGS.get(formats.reasoning).calls)
    format_class: type[CallFormat] = TOOL_CALLS.get(name) if name else Listed
    return format_class([tool for tool in use.tools if use.allows(tool.name)])


@dataclass(frozen=True, slots=True)
class OutputPlan:
    """How one request's output is read. `parser` makes a new one for each choice."""

    use: ToolUse
    calls: CallFormat | None
    thinking: Thinking | None
    opening: Opening
    separate_reasoning: bool = True

    @property
    def calls_alone(self) -> bool:
        """True if the output has only calls besides reasoning. Other text is then a call's beginning that the
        limit has cut."""
        return self.calls is not None and self.use.forced and self.separate_reasoning

    def parser(self) -> OutputParser:
        return OutputParser(
            self.thinking, self.opening, self.calls, separate_reasoning=self.separate_reasoning
        )


def output_plan(
    use: ToolUse,
    prompt: str,
    formats: Formats,
    *,
    message_prefix: str | None = None,
    separate_reasoning: bool = True,
) -> OutputPlan:
    """`prompt`: as rendered; its end says whether the model is already thinking. `message_prefix`: what the
    client wrote of the answer."""
    calls = None if use.choice == "none" else call_format(use, formats)
    thinking = None if formats.reasoning is None else REASONINGS.get(formats.reasoning)
    opening = (
        Opening.NONE
        if thinking is None
        else thinking.opening(prompt)
        if message_prefix is None
        else thinking.goes_on(message_prefix)
    )
    return OutputPlan(use, calls, thinking, opening, separate_reasoning)


def apply_output_plan(plan: OutputPlan, sampling: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
    """`sampling` with what the plan asks of it: the grammar of forced calls, room for reasoning, and markers
    that stay visible."""
    spell = spelled_by(tokenizer.marker_id)
    if plan.calls is not None and plan.use.forced:
        # A form of the answer holds for answers without calls, as in vLLM and SGLang.
        if sampling.grammar is not None and sampling.grammar.field != "response_format":
            raise InvalidRequest(
                "tool_choice and another constraint of the output exclude each other: give one of them",
                "tool_choice",
            )
        sampling = replace(
            sampling, grammar=GrammarSpec("tool_calls", calls_grammar(plan.use, plan.calls, spell))
        )
    elif plan.calls is not None and sampling.grammar is not None:
        # The constraint is one of the answer: a model that may call tools must still be able to.
        sampling = replace(
            sampling, grammar=replace(sampling.grammar, instead=calls_grammar(plan.use, plan.calls, spell))
        )
    if sampling.grammar is not None and plan.thinking is not None:
        lead = "" if sampling.grammar.kind == "tool_calls" else plan.thinking.lead(plan.opening, spell)
        sampling = replace(
            sampling,
            grammar=replace(sampling.grammar, front=plan.thinking.front(plan.opening, spell), lead=lead),
        )
    sampling = apply_thinking_budget(sampling, plan.thinking, plan.opening, tokenizer)
    tokens = [
        *((*plan.calls.markers, *plan.calls.tokens) if plan.calls else ()),
        *(plan.thinking.tokens if plan.thinking else ()),
    ]
    if any(tokenizer.marker_id(token) in tokenizer.hidden_ids for token in tokens):
        sampling = replace(sampling, skip_special_tokens=False)
    return sampling


def is_strict(definition: dict[str, Any]) -> bool:
    return definition["function"].get("strict") is True


def calls_grammar(use: ToolUse, calls: CallFormat, spell: Spell) -> str:
    """Raises InvalidRequest that names the tool whose schema cannot be enforced, where a call was demanded or
    the tool is strict. May take seconds, in any thread."""
    offered = [
        enforceable(
            tool,
            lambda tool: calls.grammar([tool], False, spell),
            f"tools[{index}].function.parameters" if use.forced or is_strict(definition) else None,
        )
        for index, tool, definition in zip(use.indices, use.tools, use.definitions, strict=True)
        if use.allows(tool.name)
    ]
    grammar = calls.grammar(offered, use.several, spell)
    if len(grammar) > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(
            f"tools make a grammar of {len(grammar)} characters, at most {MAX_GRAMMAR_BYTES} are allowed",
            "tools",
        )
    return grammar


# -- what a template is given beside the messages ------------------------------------------------------------

# switches that not every template has
ALWAYS_KNOWN = frozenset({"enable_thinking", "thinking", "reasoning_effort"})
MAX_VALUE = 256  # characters
MAX_VARIABLES = 16


def default_variables(config: ServerConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns the variables of --default-chat-template-kwargs. Raises ConfigError."""
    try:
        return template_variables(config.template_kwargs, None, tokenizer)
    except InvalidRequest as error:
        raise ConfigError(f"--default-chat-template-kwargs: {error}") from error


def template_variables(
    kwargs: Mapping[str, Any] | None, effort: str | None, tokenizer: Tokenizer
) -> dict[str, Any]:
    """Plain values for variables that the model's own template mentions: nothing that could change what the
    library does."""
    variables: dict[str, Any] = {}
    if effort is not None:
        variables = {"reasoning_effort": effort} | (
            {"enable_thinking": False, "thinking": False} if effort == "none" else {}
        )
    if len(kwargs or {}) > MAX_VARIABLES:
        raise InvalidRequest(
            f"chat_template_kwargs has {len(kwargs or {})} entries, at most {MAX_VARIABLES} are allowed",
            "chat_template_kwargs",
        )
    for name, value in (kwargs or {}).items():
        place = f"chat_template_kwargs.{name[:50]}"
        if name not in ALWAYS_KNOWN and not (
            name.isidentifier() and len(name) <= MAX_VALUE and tokenizer.template_takes(name)
        ):
            raise InvalidRequest(f"{place}: the model's chat template has no such variable", place)
        if not isinstance(value, bool | int | float | str | None) or len(str(value)) > MAX_VALUE:
            raise InvalidRequest(f"{place} must be a short string, a number, true, false or null", place)
        check_text(str(value), place)
        variables[name] = value
    # one switch, of two names
    for name, other in (("enable_thinking", "thinking"), ("thinking", "enable_thinking")):
        if isinstance(variables.get(name), bool):
            variables.setdefault(other, variables[name])
    return variables
