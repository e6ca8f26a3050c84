"""The demo model's texts in float32 on a CPU, written down once and computed again by test_recorded.py: a change that is meant to change
no text is shown to change none.

`python -m tests.recorded.record` writes demo_fp32.json anew, with the code that is imported. Only a change that is meant to change texts
(of what a seed draws, say) is a reason to do so, and its commit says why. Everything goes through `mtpserve.LLM`, the public interface.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mtpserve.core.sampling import GrammarSpec, SamplingParams
from mtpserve.llm import LLM

FILE = Path(__file__).with_name("demo_fp32.json")
BATCH, TOKENS = 16, 24

HEADS = (
    "import os\n\n", "class Stack:\n    ", "# The three laws\n", '"""Read a file.\n', "try:\n    ", "for key in table:\n    ",
    "@property\ndef name(self):\n", "a = 1\nb = 2\na = 1\nb = 2\n",
)  # fmt: skip
BODIES = (
    "def read_lines(path):\n    ", "if value is None:\n        raise ", "return self.", "for i in range(", "x = [1, 2, 3]\nx = [1, 2,",
    "def __init__(self, name, ", "# This module ", "with open(path) as file:\n        for line in file:\n            ",
)  # fmt: skip
PROMPTS = tuple(head + body for head in HEADS for body in BODIES)

PLAIN: dict[str, Any] = {
    "dtype": "float32", "device": "cpu", "max_total_tokens": 4096, "max_running_requests": BATCH, "speculative_algorithm": "none",
}  # fmt: skip
CHAIN = PLAIN | {"speculative_algorithm": "MTP", "speculative_adaptive": False, "speculative_num_steps": 3}
TREE = PLAIN | {
    "speculative_algorithm": "MTP", "speculative_adaptive": False, "speculative_num_steps": 4, "speculative_eagle_topk": 2,
    "speculative_num_draft_tokens": 9,
}  # fmt: skip
ENGINES: dict[str, dict[str, Any]] = {
    "plain": PLAIN,
    "chain": CHAIN,
    "tree": TREE,
    "ngram": PLAIN | {"speculative_algorithm": "NGRAM", "speculative_adaptive": False, "speculative_num_steps": 3},
    "mtp+ngram": PLAIN | {"speculative_algorithm": "MTP+NGRAM", "speculative_adaptive": False, "speculative_num_steps": 3},
}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "size": {"type": "integer"}, "tags": {"enum": ["a", "b"]}},
    "required": ["name", "size", "tags"],
    "additionalProperties": False,
}
GRAMMARS = (GrammarSpec("json_schema", json.dumps(SCHEMA)), GrammarSpec("regex", "[a-f]+( [a-z]+){2,6}\\."))
KINDS = ("greedy", "seeded", "greedy grammar", "seeded grammar")


@dataclass(frozen=True, slots=True)
class Case:
    """One recorded text: the request of prompt `number`, among those of its batch, to the engine of this name."""

    engine: str
    kind: str
    number: int

    @property
    def key(self) -> str:
        return f"{self.engine}, {self.kind}"

    @property
    def prompt(self) -> str:
        return PROMPTS[self.number]

    @property
    def sampling(self) -> SamplingParams:
        how: dict[str, Any] = {"temperature": 0.0} if self.kind.startswith("greedy") else {"temperature": 0.8, "seed": 1000 + self.number}
        if self.kind.endswith("grammar"):
            return SamplingParams(max_tokens=TOKENS, grammar=GRAMMARS[self.number % len(GRAMMARS)], **how)
        return SamplingParams(max_tokens=TOKENS, ignore_eos=True, **how)


def kinds(engine: str) -> tuple[str, ...]:
    """Grammars with plain decoding, a chain and a tree."""
    return KINDS if engine in ("plain", "chain", "tree") else KINDS[:2]


def texts(llm: LLM, engine: str, batches: int) -> Iterator[tuple[Case, list[int]]]:
    """The first batches' of each kind."""
    for kind in kinds(engine):
        for first in range(0, batches * BATCH, BATCH):
            cases = [Case(engine, kind, number) for number in range(first, first + BATCH)]
            done = llm.generate([case.prompt for case in cases], [case.sampling for case in cases])
            yield from zip(cases, (completion.tokens for completion in done), strict=True)


def first_difference(one: list[int], other: list[int]) -> int:
    """The place of it; the shorter's length where one begins the other."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def explained_by_rounding(llm: LLM, case: Case, recorded: list[int], computed: list[int], bound: float) -> bool:
    """Whether logits that are changed by no more than `bound` give the recorded token where the texts first differ. What follows that
    token is another text's continuation, of which nothing is known.

    This holds on every machine and for every way of choosing a token: argmax, a race with a seed's noise, the coin of a rejection.
    """
    place = first_difference(recorded, computed)
    if place == min(len(recorded), len(computed)):
        return False
    wanted, got = recorded[place], computed[place]
    changes = [
        bias for size in (bound / 16, bound / 4, bound) for bias in ({wanted: size}, {got: -size}, {wanted: size / 2, got: -size / 2})
    ]
    done = llm.generate([case.prompt] * len(changes), [replace(case.sampling, logit_bias=bias) for bias in changes])
    return any(completion.tokens[: place + 1] == recorded[: place + 1] for completion in done)


def main() -> None:
    recorded: dict[str, list[list[int]]] = {}
    for engine, options in ENGINES.items():
        with LLM("demo", **options) as llm:
            for case, tokens in texts(llm, engine, len(PROMPTS) // BATCH):
                recorded.setdefault(case.key, []).append(tokens)
    parts = (f" {json.dumps(key)}: [\n" + ",\n".join(map(json.dumps, lists)) + "\n ]" for key, lists in recorded.items())
    FILE.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
