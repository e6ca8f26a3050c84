"""The demo model writes in float32 what it wrote when demo_fp32.json was recorded: see record.py."""

from __future__ import annotations

import json

import pytest

from mtpserve.core.sampling import SamplingParams
from mtpserve.llm import LLM
from tests import selection
from tests.recorded.record import BATCH, ENGINES, FILE, PLAIN, PROMPTS, Case, explained_by_rounding, kinds, texts

RECORDED: dict[str, list[list[int]]] = json.loads(FILE.read_text(encoding="utf-8"))
BATCHES = len(PROMPTS) // BATCH if selection.ALL else 1  # of each kind

# What summing in another order (another instruction set, other shapes of a batch) may change in a logit, in float32. Measured on these
# prompts: bfloat16 moves the gap between two likely tokens by at most 1.1 against float32. A rounding error grows with the unit
# roundoff: 2^-24 for 2^-8, times the square root of 512, the longest sum, which bfloat16's products accumulate in float32 but float32's
# do not accumulate in anything finer (N. Higham, Accuracy and Stability, §3.1; Higham and Mary 2019, https://doi.org/10.1137/18M1226312).
ROUNDING = 1.1 * 2.0**-16 * 512**0.5  # 3.8e-4


@pytest.mark.parametrize("engine", ENGINES)
def test_texts_are_those_recorded(engine: str) -> None:
    with LLM("demo", **ENGINES[engine]) as llm:
        different = [(case, tokens) for case, tokens in texts(llm, engine, BATCHES) if tokens != RECORDED[case.key][case.number]]
        for case, tokens in different:
            recorded = RECORDED[case.key][case.number]
            assert explained_by_rounding(llm, case, recorded, tokens, 2 * ROUNDING), (case, recorded, tokens)


def test_every_case_is_recorded() -> None:
    assert set(RECORDED) == {f"{engine}, {kind}" for engine in ENGINES for kind in kinds(engine)}
    assert all(len(lists) == len(PROMPTS) == 64 for lists in RECORDED.values())


def test_a_defect_is_not_taken_for_rounding() -> None:
    """Were another seed's text recorded, or one with another fifth token, this engine's would not do."""
    case = Case("plain", "seeded", 0)
    computed = RECORDED[case.key][0]
    with LLM("demo", **PLAIN) as llm:
        other = llm.generate(case.prompt, SamplingParams(max_tokens=24, temperature=0.8, seed=5, ignore_eos=True))[0].tokens
        for recorded in (other, [*computed[:4], 7, *computed[5:]], computed[:4]):
            assert not explained_by_rounding(llm, case, recorded, computed, 2 * ROUNDING)
