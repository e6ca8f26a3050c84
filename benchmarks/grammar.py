"""Grammars under speculation: 300 requests with 30 schemas, 16 at once, T = 1, on the demo model.

Every output that ends by itself is validated with `jsonschema`; then the same prompts, with as many tokens each, run without grammars.
Exit code 1 for an output that does not validate, or below the target of 0.7 times the throughput.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import jsonschema
from common.record import save

from mtpserve import LLM, SamplingParams
from mtpserve.core.sampling import GrammarSpec

TARGET = 0.7
STRING, SHORT = {"type": "string"}, {"type": "string", "maxLength": 12}


def closed(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def schemas() -> list[dict[str, Any]]:
    leaf = closed(id={"type": "integer", "minimum": 0, "maximum": 999}, ok={"type": "boolean"})
    linked = {"type": "object", "properties": {"v": {"type": "integer"}, "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/n"}]}},
              "required": ["v", "next"], "additionalProperties": False}  # fmt: skip
    tree = {"type": "object", "properties": {"name": SHORT, "children": {"type": "array", "items": {"$ref": "#/$defs/t"}, "maxItems": 2}},
            "required": ["name", "children"], "additionalProperties": False}  # fmt: skip
    return [
        leaf,
        closed(name=SHORT, age={"type": "integer"}),
        closed(a=leaf, b=leaf),
        closed(items={"type": "array", "items": leaf, "maxItems": 3}),
        closed(color={"enum": ["red", "green", "blue"]}, size={"enum": [1, 2, 3, None]}),
        closed(date={"type": "string", "pattern": "^[0-9]{4}-[0-9]{2}-[0-9]{2}$"}),
        closed(code={"type": "string", "pattern": "^[A-Z]{3}-[0-9]+$", "maxLength": 10}),
        {"$defs": {"n": linked}, "$ref": "#/$defs/n"},
        {"$defs": {"t": tree}, "$ref": "#/$defs/t"},
        closed(text={"type": "string", "minLength": 40, "maxLength": 120}),
        {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 5},
        {"enum": ["yes", "no", "maybe"]},
        closed(value={"anyOf": [{"type": "integer"}, SHORT, {"type": "null"}]}),
        closed(deep=closed(deeper=closed(deepest=closed(x={"type": "boolean"})))),
        closed(kind={"const": "fixed"}, n={"type": "number"}),
        {"type": "object", "properties": {"a": {"type": "integer"}, "b": SHORT}, "additionalProperties": False},
        closed(tags={"type": "array", "items": SHORT, "minItems": 1, "maxItems": 4}),
        closed(matrix={"type": "array", "items": {"type": "array", "items": {"type": "integer"}, "maxItems": 3}, "maxItems": 3}),
        closed(flag={"type": "boolean"}, reason=SHORT, score={"type": "number"}),
        {"oneOf": [closed(circle={"type": "number"}), closed(square={"type": "integer"})]},
        closed(email={"type": "string", "pattern": "^[a-z]{1,8}@[a-z]{1,8}[.]com$"}),
        closed(hex={"type": "string", "pattern": "^0x[0-9a-f]{1,8}$"}),
        closed(function=SHORT, arguments=closed(path=SHORT, count={"type": "integer", "minimum": 1, "maximum": 10})),
        closed(person=closed(first=SHORT, last=SHORT), roles={"type": "array", "items": {"enum": ["admin", "user"]}, "maxItems": 2}),
        {"type": "array", "items": closed(k=SHORT, v={"type": "boolean"}), "minItems": 1, "maxItems": 2},
        closed(percent={"type": "integer", "minimum": 0, "maximum": 100}),
        {"type": "string", "maxLength": 30},
        closed(x={"type": "null"}, y=STRING | {"maxLength": 60}),
        closed(version={"type": "string", "pattern": "^[0-9]+[.][0-9]+[.][0-9]+$", "maxLength": 11}),
        closed(status={"enum": ["ok", "error"]}, code={"type": "integer", "minimum": 100, "maximum": 599}, body=closed(message=SHORT)),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--json")
    args = parser.parse_args()
    wanted = schemas()
    assert len(wanted) == 30
    llm = LLM(
        "demo", speculative_algorithm="MTP", speculative_num_steps=args.steps, max_running_requests=args.concurrency, max_total_tokens=16384
    )
    prompts = [f"import json\n\n# record {i}\nrecord = json.loads('" for i in range(args.requests)]

    def run(sampling: list[SamplingParams]) -> tuple[list[Any], float]:
        start = time.perf_counter()
        outputs = llm.generate(prompts, sampling)
        return outputs, sum(len(each.tokens) for each in outputs) / (time.perf_counter() - start)

    specs = [GrammarSpec("json_schema", json.dumps(wanted[i % 30])) for i in range(args.requests)]
    llm.generate(prompts[0], SamplingParams(max_tokens=8, grammar=specs[0]))  # loads the library
    ended, constrained = run(
        [SamplingParams(max_tokens=args.max_tokens, temperature=1.0, seed=i, grammar=spec) for i, spec in enumerate(specs)]
    )
    stats = llm.engine.stats
    forced = stats.accepted_tokens_by_source["grammar"], stats.draft_tokens_by_source["grammar"]
    finished, invalid = 0, []
    for i, each in enumerate(ended):
        if each.finish_reason == "stop":
            finished += 1
            try:
                jsonschema.validate(json.loads(each.text), wanted[i % 30])
            except ValueError as error:
                invalid.append((i, each.text, str(error)))
            except jsonschema.ValidationError as error:
                invalid.append((i, each.text, error.message))
    lengths = [len(each.tokens) for each in ended]
    _, free = run([SamplingParams(max_tokens=n, temperature=1.0, seed=i, ignore_eos=True) for i, n in enumerate(lengths)])
    ratio = constrained / free
    print(f"{finished} of {args.requests} ended by themselves, {len(invalid)} of these do not validate")
    print(f"{constrained:.0f} tokens/s with grammars, {free:.0f} without: {ratio:.2f} x (target {TARGET})")
    print(f"forced tokens: {forced[0]} of {forced[1]} accepted; {sum(lengths)} tokens in all")
    for i, text, reason in invalid[:5]:
        print(f"  {i}: {reason}: {text[:200]}")
    save(args.json, {"requests": args.requests, "finished": finished, "invalid": len(invalid), "with": round(constrained, 1),
                     "without": round(free, 1), "ratio": round(ratio, 3), "forced_accepted": forced[0], "steps": args.steps})  # fmt: skip
    raise SystemExit(int(bool(invalid) or ratio < TARGET))


if __name__ == "__main__":
    main()
