"""What a schema only annotates is ignored; what cannot be enforced is named by its place, without the server's own grammar."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mtpserve.config import ModelConfig
from mtpserve.core.errors import InvalidRequest
from mtpserve.core.sampling import GrammarSpec
from mtpserve.text.grammars.grammar import LLGuidanceCompiler
from mtpserve.text.grammars.json_schema import FORMATS, without_annotations
from mtpserve.text.grammars.schema_faults import loosened, refusal, schema_fault


@pytest.fixture(scope="module")
def compiler() -> LLGuidanceCompiler:
    return LLGuidanceCompiler(ModelConfig().directory, 2048, [1])


def of(**fields: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": {"type": "array", "items": fields}}}


@pytest.mark.parametrize(
    "fields",
    [
        *({"type": "string", "format": name} for name in ("path", "nanoid", "jwt", "uuid4", "uri-reference", "emoji", "binary")),
        {"format": "int32"},
        {"type": ["string", "null"], "format": "password", "pattern": "^a+$"},
        {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "integer"}},
        {"type": "object", "propertyNames": {"type": "string", "title": "Names"}},
        {"type": "object", "propertyNames": {}},
        {"type": "object", "propertyNames": True},
    ],
    ids=json.dumps,
)
def test_annotations_are_ignored(compiler: LLGuidanceCompiler, fields: dict[str, Any]) -> None:
    schema = {**of(**fields), "$defs": {"format": fields}}
    assert schema_fault(schema) is None
    compiler.compile(GrammarSpec("json_schema", json.dumps(schema)))
    compiler.compile(GrammarSpec("structural_tag", json.dumps({"format": {"type": "json_schema", "json_schema": schema}})))


def test_a_property_of_an_annotations_name_stays() -> None:
    schema = {
        "type": "object",
        "properties": {"format": {"const": "path"}, "propertyNames": {"type": "string"}},
        "default": {"format": "a"},
    }
    assert without_annotations(schema) == schema
    before = of(type="string", format="path")
    without_annotations(before)
    assert before == of(type="string", format="path"), "the client's own schema does not change"


def test_known_formats_are_enforced() -> None:
    """Each is llguidance's, and no other is."""
    for name in FORMATS:
        assert without_annotations({"type": "string", "format": name})["format"] == name
        assert refusal({"type": "string", "format": name}) is None
    for name in ("idn-email", "idn-hostname", "uri-reference", "iri", "uri-template", "json-pointer", "regex"):
        assert without_annotations({"type": "string", "format": name}) == {"type": "string"}


FAULTS: list[tuple[dict[str, Any], str, str]] = [
    (of(type="string", pattern="^(?!a).+"), "properties.a.items.pattern", "look-around"),
    (of(type="string", pattern="("), "properties.a.items.pattern", "unclosed group"),
    (of(uniqueItems=True), "properties.a.items.uniqueItems", "leave it out"),
    (of(type="object", propertyNames={"pattern": "a"}), "properties.a.items.propertyNames", "leave it out"),
    (of(oneOf=[{"type": "integer"}, {"type": "number"}]), "properties.a.items.oneOf", "use anyOf"),
    (of(type="nonsense"), "properties.a.items.type", "Invalid type"),
    (of(type="integer", multipleOf=9999991), "properties.a.items.multipleOf", "too many remainders"),
    (of(**{"$ref": "#/$defs/x"}), "properties.a.items.$ref", "/$defs/x"),
    ({"$defs": {"x": {"type": "string", "pattern": "(?=a)"}}, "$ref": "#/$defs/x"}, "$defs.x.pattern", "look-around"),
    (of(type="string", minLength="a"), "properties.a.items.minLength", "integer"),
]


@pytest.mark.parametrize(("schema", "path", "reason"), FAULTS, ids=str)
def test_a_fault_names_its_word(compiler: LLGuidanceCompiler, schema: dict[str, Any], path: str, reason: str) -> None:
    assert path in str(schema_fault(schema)) and reason in str(schema_fault(schema))
    with pytest.raises(InvalidRequest) as error:
        compiler.compile(GrammarSpec("json_schema", json.dumps(schema), front='front: "a"\n', field="guided_json"))
    told = str(error.value)
    assert told.startswith("guided_json: json_schema is not usable: ") and path in told and reason in told
    assert "front" not in told and "start" not in told and "coerce" not in told, "nothing of the server's own grammar"


@pytest.mark.parametrize(("schema", "path", "reason"), FAULTS, ids=str)
def test_a_schema_without_its_faulty_word_is_enforced(schema: dict[str, Any], path: str, reason: str) -> None:
    fault = schema_fault(schema)
    assert fault is not None
    assert schema_fault(loosened(schema, fault.path)) is None


def test_a_fault_in_a_shared_part_or_in_none_loosens_it() -> None:
    shared = {"type": "object", "properties": {"a": {"$ref": "#/$defs/x"}}}
    assert loosened(shared, ("properties", "a", "pattern")) == {"type": "object", "properties": {"a": {}}}
    assert loosened(shared, ()) == {"type": "object"}


@pytest.mark.parametrize(
    "schema", [{"items": {"$ref": "#/items"}}, {}, {"$ref": "#/d/0", "d": {str(i): {"$ref": f"#/d/{i + 1}"} for i in range(8000)}}]
)
def test_a_schema_that_refers_to_itself_ends_no_process(schema: dict[str, Any]) -> None:
    schema_fault(schema)
