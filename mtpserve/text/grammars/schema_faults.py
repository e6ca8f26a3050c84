"""Why a schema cannot be enforced: the place of the word, and the reason. Compiles the schema alone, without
a vocabulary."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from hashlib import blake2b
from time import monotonic
from typing import Any, NamedTuple

from llguidance import LLMatcher

from mtpserve.text.grammars.compile_threads import COMPILE_SECONDS, CompileThreads
from mtpserve.text.grammars.grammar_source import check_multiples, json_grammar
from mtpserve.text.grammars.json_schema import Path, dotted, parts, replaced, without_annotations

# what llguidance refuses; named first, since it does not look at parts that nothing refers to
NOT_ENFORCED = frozenset(
    {
        "not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems", "propertyNames",
        "dependencies",
        "dependentRequired", "dependentSchemas", "unevaluatedProperties", "unevaluatedItems",
    }
)  # fmt: skip
LOCATION = re.compile(r"^at \d+\(\d+\): |^failed to compile JSON schema: ")
EXCERPT = re.compile(r"^\s*\d+ \|")  # a line of a grammar, as llguidance shows it
# the library's errors, for users
REASONS = {
    "oneOf constraints": "whether exactly one of the alternatives fits is not decidable: use anyOf",
    "Unimplemented keys": "no grammar can enforce it: leave it out",
}
MAX_KNOWN = 1024
SEARCH_SECONDS = 0.5  # for the place of a fault

THREADS = CompileThreads()
# by the schema's hash: clients send the same tools with every request
KNOWN: dict[bytes, SchemaFault | None] = {}


class SchemaFault(NamedTuple):
    path: Path  # of the word; of the part where it is no single one
    reason: str

    def __str__(self) -> str:
        return f"{dotted(self.path)[1:] or 'it'} cannot be enforced: {self.reason}"


def schema_fault(schema: Mapping[str, Any]) -> SchemaFault | None:
    """None: it can be enforced. May take until the deadline, in any thread. Raises EngineBusy."""
    key = blake2b(json.dumps(schema).encode()).digest()
    if key in KNOWN:
        return KNOWN[key]
    faults: list[SchemaFault | None] = []
    THREADS.run(lambda: find_fault(dict(schema), faults))
    if not faults:
        return SchemaFault((), f"it takes longer than {COMPILE_SECONDS:g} s to compile")
    if len(KNOWN) >= MAX_KNOWN:
        KNOWN.clear()
    KNOWN[key] = faults[-1]
    return faults[-1]


def find_fault(schema: dict[str, Any], faults: list[SchemaFault | None]) -> None:
    """Appends what it learns, the most exact last."""
    schema = without_annotations(schema)
    for path, part in parts(schema):
        for word in sorted(part.keys() & NOT_ENFORCED):
            if part[word] is not False:
                faults.append(SchemaFault((*path, word), REASONS["Unimplemented keys"]))
                return
    reason = refusal(schema)
    faults.append(None if reason is None else SchemaFault((), reason))
    if reason is None:
        return
    definitions: dict[str, Any] = {word: schema[word] for word in ("$defs", "definitions") if word in schema}
    until = monotonic() + SEARCH_SECONDS
    for path, part in sorted(parts(schema), key=lambda entry: -len(entry[0])):
        if monotonic() > until:
            return
        if refusal({**definitions, **part}) == reason:
            words = [word for word in part if refusal(without_word({**definitions, **part}, word)) != reason]
            faults.append(SchemaFault((*path, *words[:1]), reason))
            return


def without_word(part: dict[str, Any], word: str) -> dict[str, Any]:
    return {name: value for name, value in part.items() if name != word}


def refusal(schema: dict[str, Any]) -> str | None:
    try:
        grammar = json_grammar(schema)
        check_multiples(grammar)
        return plain_reason(LLMatcher.validate_grammar(grammar)) or None
    # a Rust panic is not an Exception
    except BaseException as error:
        return plain_reason(str(error)) or type(error).__name__


def plain_reason(text: str) -> str:
    """llguidance's reason in one line, without the grammar that it shows: the client did not write that."""
    text = text.split("<backtrace>")[0].replace("<non-verbose/>", "")
    for word, reason in REASONS.items():
        if word in text:
            return reason
    if "regex parse error" in text:
        return "its regular expression is not usable: " + text.rpartition("error: ")[2].split("\n")[0].strip()
    lines = (line for line in text.split("\n") if not EXCERPT.match(line))
    reason = " ".join(" ".join(lines).split())
    while LOCATION.match(reason):
        reason = LOCATION.sub("", reason, count=1)
    return reason


def loosened(schema: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The schema without the word at `path`; where it cannot be taken out, its part allows anything."""
    try:
        return dict(replaced(schema, path)) if path else {"type": "object"}
    except (KeyError, IndexError, TypeError):
        return dict(replaced(schema, path[:-1], {})) if path[:-1] else {"type": "object"}
