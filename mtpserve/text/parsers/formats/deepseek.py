"""Calls as DeepSeek-V3, R1 and V3.1 write them: name and arguments between markers of their own. Source:
their chat templates."""

from __future__ import annotations

from collections.abc import Sequence

from mtpserve.text.parsers.call_grammar import arguments_json, calls_of, text
from mtpserve.text.parsers.scanner import Reading, Scanner
from mtpserve.text.parsers.tools import MORE, CallFormat, Spell, Tool, in_name

SECTION, SECTION_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
FENCE = "```"


class DeepSeekV3(CallFormat):
    """`function⟨sep⟩name`, and the arguments in a fenced block. V3.1's layout is understood as well."""

    markers: tuple[str, ...] = (SECTION, CALL)
    example = (
        f"{SECTION}{CALL}function{SEPARATOR}tool_call_name\n"
        f"{FENCE}json\ntool_call_arguments\n{FENCE}{CALL_END}{MORE}{SECTION_END}"
    )

    def read(self, scan: Scanner, marker: str) -> Reading[None]:
        if marker == SECTION:
            scan.take(len(marker))
        while (yield from scan.follows(CALL)):
            if not (yield from self._call(scan)):
                return
        if not scan.record and (yield from scan.follows(SECTION_END)):
            scan.layout()

    def _call(self, scan: Scanner) -> Reading[bool]:
        """Reads a call after the marker was taken → whether a call followed."""
        yield from scan.blanks()
        name = yield from scan.while_in(in_name)
        if not name or not (yield from scan.follows(SEPARATOR)):
            return False
        yield from scan.blanks()
        name = (yield from scan.while_in(in_name)) or name
        fenced = yield from scan.follows(FENCE + "json", FENCE)
        yield from scan.blanks()
        if (yield from scan.peek()) == "{":
            scan.begin(name)
            yield from scan.json_value(scan.arguments, CALL_END)
            yield from scan.follows(*([FENCE] if fenced else []))
            yield from scan.follows(CALL_END)
        else:
            yield from scan.follows(*([FENCE] if fenced else []))
            if not (yield from scan.follows(CALL_END)):
                return False
            scan.begin(name)
            scan.arguments("{}")
        scan.end()
        return True

    def grammar(self, tools: Sequence[Tool], several: bool, spell: Spell) -> str:
        return calls_of(
            [f"{spell(CALL)} {self.body(tool, spell)} {spell(CALL_END)}" for tool in tools],
            several, begin=spell(SECTION), between=self.BETWEEN, end=spell(SECTION_END),
        )  # fmt: skip

    BETWEEN = text("\n")

    def body(self, tool: Tool, spell: Spell) -> str:
        head, tail = text(f"{tool.name}\n{FENCE}json\n"), text(f"\n{FENCE}")
        return f"{text('function')} {spell(SEPARATOR)} {head} {arguments_json(tool.parameters)} {tail}"


class DeepSeekV31(DeepSeekV3):
    """`name⟨sep⟩{…}`, one after the other."""

    example = f"{SECTION}{CALL}tool_call_name{SEPARATOR}tool_call_arguments{CALL_END}{MORE}{SECTION_END}"
    BETWEEN = text("")

    def body(self, tool: Tool, spell: Spell) -> str:
        return f"{text(tool.name)} {spell(SEPARATOR)} {arguments_json(tool.parameters)}"
