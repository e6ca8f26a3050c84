"""Calls with each argument between tags of its own, as GLM-4.5, Qwen3-Coder, MiMo-V2, MiniMax-M2 and
DeepSeek-V3.2 write them, converted to JSON.

A parameter that can only be a string is passed on while it arrives; any other one when it is complete and its
type is known. Sources: the chat templates of GLM-4.5 and of Qwen3-Coder, encoding_dsv32.py in DeepSeek-V3.2's
repository.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence

from mtpserve.text.parsers.call_grammar import calls_of, text
from mtpserve.text.parsers.formats.tagged_values import (
    as_json,
    inside_string,
    property_of,
    types_of,
    value_rule,
)
from mtpserve.text.parsers.scanner import Reading, Scanner
from mtpserve.text.parsers.tools import CallFormat, Schema, Spell, Tool, in_name

CALL, CALL_END = "<tool_call>", "</tool_call>"
STRING = frozenset({"string"})


class Tagged(CallFormat):
    """The common part: KEY key KEY_END VALUE value VALUE_END, repeated, and then one of ENDS."""

    KEY = KEY_END = VALUE = VALUE_END = ""
    ENDS: tuple[str, ...] = ()
    NEXT = CALL  # begins a further call, where the end of one is missing
    UNCLOSED: tuple[str, ...] = ()  # what ends a value whose end tag is missing
    PADDED = False  # there is a line break before and after each value
    BEFORE = ""  # characters of the end tag before the token in it
    QUOTED = False  # values that need not be strings are JSON, strings among them too

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._tools = {tool.name: tool.parameters for tool in tools}

    def parameters(self, scan: Scanner, name: str, tag: str) -> Reading[str]:
        """Reads the arguments of a call that was begun; `tag` is the one just taken → the tag that ended
        them, "" if none did."""
        lead = "{"
        while tag == self.KEY:
            if not (yield from self._parameter(scan, self._tools.get(name, {}), lead)):
                return ""
            lead = ", "
            tag = yield from scan.follows(self.KEY, *self.ENDS)
        # if the text ends before the tag, the arguments are incomplete and stay invalid JSON
        if tag or not scan.ended:
            scan.arguments("{}" if lead == "{" else "}")
        return tag

    def _parameter(self, scan: Scanner, schema: Schema, lead: str) -> Reading[bool]:
        parts: list[str] = []
        if not (yield from scan.until((self.KEY_END,), parts.append)):
            return False
        scan.take(len(self.KEY_END))
        if self.VALUE and not (yield from scan.follows(self.VALUE)):
            return False
        key, types = self.typed("".join(parts), schema)
        head = lead + json.dumps(key, ensure_ascii=False) + ": "
        if types == STRING:
            scan.arguments(head + '"')
            ended = yield from self._value(scan, lambda piece: scan.arguments(inside_string(piece)))
            scan.arguments('"' if ended else "")
            return ended
        pieces: list[str] = []
        ended = yield from self._value(scan, pieces.append)
        if ended:
            scan.arguments(head + as_json("".join(pieces), types))
        return ended

    def typed(self, written: str, schema: Schema) -> tuple[str, frozenset[str] | None]:
        """A key as it is written → the parameter's name and the types that its value may have, None where it
        is JSON of any."""
        key = written.strip()
        return key, types_of(property_of(key, schema), schema)

    def _value(self, scan: Scanner, passed: Callable[[str], None]) -> Reading[bool]:
        """Takes a value up to an end tag that is followed by something that may follow it: the value itself
        may contain the end tag."""
        if self.PADDED and (yield from scan.peek()) == "\n":
            scan.take(1)
        while tag := (
            yield from scan.until(
                (self.VALUE_END, *self.UNCLOSED), passed, hold="\n" if self.PADDED else "", max_blanks=1
            )
        ):
            held = scan.text.index(tag)  # a line break that belongs to the format
            if tag != self.VALUE_END:
                scan.take(held)
                return True
            if (yield from scan.ahead(held + len(tag), self.KEY, self.NEXT, *self.ENDS)):
                scan.take(held + len(tag))
                return True
            passed(scan.take(held + len(tag)))
        return False

    def parameter_rules(
        self, tool: Tool, number: int, key_of: Callable[[str], str], end: tuple[str, ...], spell: Spell
    ) -> list[str]:
        """→ an expression for the sequence of parameters, then the rules of their values."""
        properties, required = tool.parameters.get("properties"), tool.parameters.get("required")
        keys = list(properties) if isinstance(properties, Mapping) else []
        needed = required if isinstance(required, list) else []
        keys += [key for key in needed if key not in keys]
        parts, rules = [], []
        for place, key in enumerate(keys):
            rule = f"value_{number}_{place}"
            parts.append(f"({key_of(key)} {rule}){'' if key in needed else '?'}")
            rules.append(value_rule(rule, key, tool.parameters, end, spell, self.BEFORE, self.QUOTED))
        return [" ".join(parts), *rules]


class GLM45(Tagged):
    START, END = CALL, CALL_END
    markers: tuple[str, ...] = (CALL,)
    KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
    ENDS = (CALL_END,)
    LINE = "\n"  # between the parts, in the grammar; `read` accepts any blanks there
    example = f"{CALL}tool_call_name\n{KEY}key{KEY_END}\n{VALUE}value{VALUE_END}\n{CALL_END}"

    def read(self, scan: Scanner, marker: str) -> Reading[None]:
        scan.take(len(marker))
        yield from scan.blanks()
        name = yield from scan.while_in(in_name)
        tag = (yield from scan.follows(self.KEY, self.END)) if name else ""
        if tag:
            scan.begin(name)
            yield from self.parameters(scan, name, tag)
            scan.end()

    def grammar(self, tools: Sequence[Tool], several: bool, spell: Spell) -> str:
        def key_of(key: str) -> str:
            return " ".join(
                (spell(self.KEY), text(key), spell(self.KEY_END), text(self.LINE), spell(self.VALUE))
            )

        calls, rules = [], ""
        for number, tool in enumerate(tools):
            parameters, *values = self.parameter_rules(
                tool, number, key_of, (self.VALUE_END, self.LINE), spell
            )
            head = text(tool.name + self.LINE)
            calls.append(f"{spell(self.START)} {head} {parameters} {spell(self.END)}")
            rules += "".join(values)
        return calls_of(calls, several, between=text(self.LINE), rules=rules)


class GLM47(GLM45):
    LINE = ""
    example = GLM45.example.replace("\n", "")


class LongcatXML(GLM45):
    """That of LongCat-Flash-Thinking-2601 and later: GLM-4.5's layout, in tags with other names."""

    START, END = "<longcat_tool_call>", "</longcat_tool_call>"
    markers = (START,)
    KEY, KEY_END = "<longcat_arg_key>", "</longcat_arg_key>"
    VALUE, VALUE_END = "<longcat_arg_value>", "</longcat_arg_value>"
    ENDS, NEXT = (END,), START
    example = f"{START}tool_call_name\n{KEY}key{KEY_END}\n{VALUE}value{VALUE_END}\n{END}"


class Qwen3Coder(Tagged):
    FUNCTION, FUNCTION_END = "<function=", "</function>"
    markers: tuple[str, ...] = (CALL, FUNCTION)  # the model sometimes omits the first one
    KEY, KEY_END, VALUE_END = "<parameter=", ">", "</parameter>"
    ENDS = (FUNCTION_END, CALL_END)
    UNCLOSED = ("\n<parameter=", "\n</function>")
    PADDED = True
    example = (
        f"{CALL}\n{FUNCTION}tool_call_name>\n"
        f"{KEY}key{KEY_END}\nvalue\n{VALUE_END}\n{FUNCTION_END}\n{CALL_END}"
    )

    def read(self, scan: Scanner, marker: str) -> Reading[None]:
        scan.take(len(marker))
        if marker == CALL and not (yield from scan.follows(self.FUNCTION)):
            return
        name = yield from scan.while_in(in_name)
        if not name or not (yield from scan.follows(">")):
            return
        scan.begin(name)
        tag = yield from scan.follows(self.KEY, *self.ENDS)
        if (yield from self.parameters(scan, name, tag)) == self.FUNCTION_END:
            yield from scan.follows(CALL_END)
        scan.end()

    def grammar(self, tools: Sequence[Tool], several: bool, spell: Spell) -> str:
        line = "\n" if self.PADDED else ""

        def key_of(key: str) -> str:
            return text(f"{self.KEY}{key}>{line}")

        calls, rules = [], ""
        for number, tool in enumerate(tools):
            parameters, *values = self.parameter_rules(
                tool, number, key_of, (f"{line}</parameter>\n",), spell
            )
            head = text(f"\n{self.FUNCTION}{tool.name}>\n")
            tail = text(self.FUNCTION_END + "\n")
            calls.append(f"{spell(CALL)} {head} {parameters} {tail} {spell(CALL_END)}")
            rules += "".join(values)
        return calls_of(calls, several, between=text("\n"), rules=rules)


class MiMo(Qwen3Coder):
    """MiMo-V2's: without line breaks around the values."""

    PADDED = False
    example = Qwen3Coder.example.replace("\nvalue\n", "value")


class Invoked(Tagged):
    """Calls in a section, each with its name in an attribute."""

    SECTION = SECTION_END = INVOKE = INVOKE_END = ""

    def read(self, scan: Scanner, marker: str) -> Reading[None]:
        if marker == self.SECTION:
            scan.take(len(marker))
        while (yield from scan.follows(self.INVOKE)):
            name = yield from scan.while_in(in_name)
            if not name or not (yield from scan.follows('">')):
                return
            scan.begin(name)
            yield from scan.blanks()
            if (yield from scan.peek()) == "{":  # at times models write all arguments as one object
                yield from scan.json_value(scan.arguments, self.INVOKE_END)
                tag = yield from scan.follows(*self.ENDS)
            else:
                tag = yield from self.parameters(scan, name, (yield from scan.follows(self.KEY, *self.ENDS)))
            scan.end()
            if tag == self.SECTION_END:
                return
        if not scan.record and (yield from scan.follows(self.SECTION_END)):
            scan.layout()


class MiniMaxM2(Invoked):
    """MiniMax-M2's, as the chat template of its checkpoints writes them."""

    SECTION, SECTION_END = "<minimax:tool_call>", "</minimax:tool_call>"
    INVOKE, INVOKE_END = '<invoke name="', "</invoke>"
    KEY, KEY_END, VALUE_END = '<parameter name="', '">', "</parameter>"
    ENDS = (INVOKE_END, SECTION_END)
    NEXT = INVOKE
    markers: tuple[str, ...] = (SECTION,)
    example = (
        f'{SECTION}\n{INVOKE}tool_call_name">\n{KEY}key{KEY_END}value{VALUE_END}\n{INVOKE_END}\n{SECTION_END}'
    )

    def grammar(self, tools: Sequence[Tool], several: bool, spell: Spell) -> str:
        def key_of(key: str) -> str:
            return text(f"{self.KEY}{key}{self.KEY_END}")

        line, calls, rules = text("\n"), [], ""
        for number, tool in enumerate(tools):
            parameters, *values = self.parameter_rules(tool, number, key_of, (f"{self.VALUE_END}\n",), spell)
            head = text(f'{self.INVOKE}{tool.name}">\n')
            calls.append(f"{head} {parameters} {text(self.INVOKE_END)}")
            rules += "".join(values)
        begin, end = f"{spell(self.SECTION)} {line}", f"{line} {spell(self.SECTION_END)}"
        return calls_of(calls, several, begin=begin, between=line, end=end, rules=rules)


class DSML(Invoked):
    """DeepSeek-V3.2's: each value says whether it is a string, and is JSON if not. Its tags contain a token
    of their own."""

    TOKEN = "｜DSML｜"
    CALLS = "function_calls"
    SECTION, SECTION_END = f"<{TOKEN}{CALLS}>", f"</{TOKEN}{CALLS}>"
    INVOKE, INVOKE_END = f'<{TOKEN}invoke name="', f"</{TOKEN}invoke>"
    KEY, KEY_END, VALUE_END = f'<{TOKEN}parameter name="', ">", f"</{TOKEN}parameter>"
    IS_STRING = '" string="'  # between a key and true or false
    ENDS = (INVOKE_END, SECTION_END)
    NEXT, BEFORE, QUOTED = INVOKE, "</", True
    markers: tuple[str, ...] = (SECTION, INVOKE)
    tokens = (TOKEN,)
    example = (
        f'{SECTION}\n{INVOKE}tool_call_name">\n'
        f'{KEY}key{IS_STRING}true"{KEY_END}value{VALUE_END}\n{INVOKE_END}\n{SECTION_END}'
    )

    def typed(self, written: str, schema: Schema) -> tuple[str, frozenset[str] | None]:
        key, string, said = written.removesuffix('"').partition(self.IS_STRING)
        if not string:
            return super().typed(key, schema)
        return key, STRING if said == "true" else None

    def grammar(self, tools: Sequence[Tool], several: bool, spell: Spell) -> str:
        def tag(begin: str, rest: str) -> str:
            return f"{text(begin)} {spell(self.TOKEN)} {text(rest)}"

        calls, rules = [], ""
        for number, tool in enumerate(tools):

            def key_of(key: str, schema: Schema = tool.parameters) -> str:
                string = "true" if types_of(property_of(key, schema), schema) == STRING else "false"
                return tag("<", f'parameter name="{key}{self.IS_STRING}{string}">')

            end = (self.TOKEN, "parameter>\n")
            parameters, *values = self.parameter_rules(tool, number, key_of, end, spell)
            calls.append(
                " ".join((tag("<", f'invoke name="{tool.name}">\n'), parameters, tag("</", "invoke>")))
            )
            rules += "".join(values)
        begin, end_tag = tag("<", f"{self.CALLS}>\n"), f"{text(chr(10))} {tag('</', f'{self.CALLS}>')}"
        return calls_of(calls, several, begin=begin, between=text("\n"), end=end_tag, rules=rules)


class ToolCallsDSML(DSML):
    """DeepSeek-V4's: the section has another name."""

    CALLS = "tool_calls"
    SECTION, SECTION_END = f"<{DSML.TOKEN}{CALLS}>", f"</{DSML.TOKEN}{CALLS}>"
    ENDS = (DSML.INVOKE_END, SECTION_END)
    markers = (SECTION, DSML.INVOKE)
    example = DSML.example.replace(DSML.CALLS, CALLS)
