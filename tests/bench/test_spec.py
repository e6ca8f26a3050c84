"""`mtpserve bench spec`: what is counted, what its numbers are made of, and that a shape of drafts changes no text."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mtpserve.config import SpecConfig
from mtpserve.core.errors import ConfigError
from mtpserve.core.sampling import SamplingParams
from mtpserve.core.spec_sizes import SpecShape
from mtpserve.engine.engine import Engine
from mtpserve.tools.bench.spec import bench_spec, grid
from mtpserve.tools.bench.spec.grid import PLAIN, SpecFigures, SpecLoad, Window
from mtpserve.tools.bench.spec.measure import SpecBench
from tests.tiny import prompts, run, tiny_engine, tiny_model

SHAPES = [SpecShape(1, 1, 1), SpecShape(3, 1, 3), SpecShape(2, 2, 3), SpecShape(3, 2, 6), SpecShape(2, 4, 9)]
ONE, FOUR = SpecLoad(1, 0.0), SpecLoad(4, 0.0)


def built(shape: SpecShape, **options: Any) -> SpecConfig:
    return SpecConfig(speculative_algorithm="MTP", **grid.options(shape), **options)


def engine_for(shapes: list[SpecShape], **options: Any) -> Engine:
    return tiny_engine(tiny_model(), built(grid.largest(shapes)), **options)


def window(steps: int, seconds: float, tokens: int, batch: int = 1, **parts: float) -> Window:
    return Window([seconds] * steps, tokens, steps * batch, parts, [[1, 2, 3]])


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_each_shape_drafts_as_an_engine_of_its_own(temperature: float) -> None:
    """Texts of seeds depend on the kind of drafts, and so on their depth and branches: these are the same, and the counters too."""
    asked, params = prompts(5), [SamplingParams(max_tokens=20, temperature=temperature, seed=i) for i in range(5)]
    one = engine_for(SHAPES)
    for shape in [*SHAPES, PLAIN, *SHAPES[::-1]]:
        one.draft_with(shape)
        own = tiny_engine(tiny_model(), built(shape) if shape.steps else 0)
        assert run(one, asked, params) == run(own, asked, params), shape
        assert one._scheduler.max_deferred_tokens == own._scheduler.max_deferred_tokens, (
            "plain decoding has no draft model that absorbs rows later"
        )
        assert one.stats.accept_lengths == own.stats.accept_lengths
        assert one.stats.draft_tokens_per_position == own.stats.draft_tokens_per_position
        assert max(one.stats.draft_tokens_per_position[shape.steps :], default=0) == 0


def test_what_is_larger_than_the_engine_is_refused() -> None:
    one = engine_for([SpecShape(2, 2, 4)])
    for shape in (SpecShape(5, 1, 5), SpecShape(2, 4, 5), SpecShape(2, 2, 5)):
        with pytest.raises(ConfigError, match="more than the engine was built for"):
            one.draft_with(shape)
    assert len(run(one, [[1, 2]], SamplingParams(max_tokens=4, temperature=0))[0]) == 4


def test_tokens_and_verifications_are_those_of_the_counters() -> None:
    engine = engine_for(SHAPES)
    bench = SpecBench(engine, prompts(9), output=12, room=24)
    for shape in (PLAIN, *SHAPES):
        engine.draft_with(shape)
        for load in (ONE, FOUR, SpecLoad(3, 0.7)):
            before = replace(engine.stats)
            made = bench.window(load, 0, 12)
            assert made.verifications == len(made.times) * load.batch and len(made.texts) == load.batch
            assert max(map(len, made.texts)) >= 12 and not engine.has_work
            if shape == PLAIN:
                assert made.tokens == made.verifications
                continue
            # Before the window each request has been verified some times, in the steps in which others still began.
            verified, accepted = (getattr(engine.stats, n) - getattr(before, n) for n in ("drafts_total", "accepted_tokens_total"))
            assert verified >= made.verifications and accepted >= made.tokens - made.verifications
            if load.batch == 1:
                assert verified == made.verifications and accepted == made.tokens - made.verifications


def test_greedy_texts_are_plain_decodings() -> None:
    engine = engine_for(SHAPES)
    ended: list[int] = []
    made = SpecBench(engine, prompts(6), output=10, room=24).run([PLAIN, *SHAPES], [ONE, FOUR], 2, lambda: ended.append(1))
    assert len(ended) == 2 * 2 * (1 + len(SHAPES)) and all(len(windows) == 2 for windows in made.values())
    for (shape, load), windows in made.items():
        figures = grid.figures(shape, load, windows, made[PLAIN, load])
        assert figures.same_text is True and 1 <= figures.accept_length <= shape.steps + 1
    assert made[PLAIN, ONE][0].texts != made[PLAIN, ONE][1].texts, "each round asks for something else"
    engine.check_integrity()


def test_a_pool_that_is_too_small_is_named() -> None:
    engine = engine_for(SHAPES, pages=20)
    with pytest.raises(ConfigError, match="too small for a batch of 8: --max-total-tokens"):
        SpecBench(engine, [[i] * 20 for i in range(8)], output=8, room=10).window(SpecLoad(8, 0.0), 0, 8)


def test_s_and_m() -> None:
    plain = [window(10, 0.01, 10), window(10, 0.02, 10), window(10, 0.01, 10)]
    drafted = [window(10, 0.03, 28, host=0.03, verify=0.15, accept=0.03, draft=0.09), window(5, 0.02, 17, draft=0.05, verify=0.03)]
    drafted.append(window(10, 0.02, 30, verify=0.1, accept=0.04, draft=0.02))
    made = grid.figures(SHAPES[1], ONE, drafted, plain)
    assert made.accept_length == pytest.approx(75 / 25) and made.step == pytest.approx(0.02)
    assert made.tokens_per_second == pytest.approx(3 / 0.02) and made.speedup == pytest.approx(1.5)
    assert made.overhead == pytest.approx(2.0) == pytest.approx(made.accept_length / made.speedup)
    assert sum(made.parts.values()) == pytest.approx(made.step) and made.parts["draft"] == pytest.approx(0.02 * 0.3)
    assert made.same_text is True and grid.figures(SHAPES[1], ONE, drafted, plain, lots=True).same_text is None
    assert grid.figures(PLAIN, ONE, plain, plain).overhead == 1.0 and grid.figures(PLAIN, ONE, plain, plain).parts == {}
    other = [replace(each, texts=[[1, 9]]) for each in drafted]
    assert grid.figures(SHAPES[1], ONE, other, plain).same_text is False


def test_the_best_line() -> None:
    def made(shape: SpecShape, load: SpecLoad, speedup: float) -> SpecFigures:
        return SpecFigures(shape, load, 2.0, 0.01, {}, 200.0, speedup, None)

    all = [made(SHAPES[0], ONE, 1.4), made(SHAPES[3], ONE, 1.6), made(SHAPES[2], ONE, 1.6), made(SHAPES[1], FOUR, 1.01)]
    found = grid.best(all, ONE)
    assert found is not None and found.shape == SHAPES[2], "of two equal ones that with fewer nodes"
    assert grid.best(all, FOUR) is None
    wanted = "--speculative-algorithm MTP --speculative-num-steps 2 --speculative-eagle-topk 2 --speculative-num-draft-tokens 4"
    assert bench_spec.advice(all, ONE, "MTP").startswith(wanted) and "plain decoding" in bench_spec.advice(all, FOUR, "MTP")
    for shape in SHAPES:  # the server takes them, and means the same
        spec = built(shape)
        assert (spec.steps, spec.topk, spec.nodes) == (shape.steps, shape.topk, shape.nodes)


def test_shapes() -> None:
    made, skipped = grid.shapes([1, 3], [1, 2], None)
    assert made == [SpecShape(1, 1, 1), SpecShape(3, 1, 3), SpecShape(1, 2, 2), SpecShape(3, 2, 6)] and not skipped
    made, skipped = grid.shapes([1, 3], [1, 2], [3, 5, 60])
    assert made == [SpecShape(1, 1, 1), SpecShape(3, 1, 3), SpecShape(1, 2, 2), SpecShape(3, 2, 2), SpecShape(3, 2, 4)]
    assert len(skipped) == 3 and skipped[0] == "1 steps, topk 2, 5 draft tokens: such a tree has 2 nodes, beside the last token"
    assert "at most 55 of its 392 nodes" in grid.shapes([7, 1], [8], [4, 57])[1][0]
    with pytest.raises(ConfigError, match="can be: 1 steps, topk 2, 9 draft tokens"):
        grid.shapes([1], [2], [9])
    assert grid.largest(made) == SpecShape(3, 2, 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num-steps", "0,1"], "--num-steps must be whole numbers from 1 to 7"),
        (["--eagle-topk", "9"], "--eagle-topk must be"),
        (["--num-steps", "1", "--eagle-topk", "2", "--num-draft-tokens", "9"], "no combination"),
        (["--batch-sizes", "1;2"], "--batch-sizes must be"),
        (["--temperatures", "-1"], "--temperatures must be"),
        (["--rounds", "0"], "--rounds must be at least 1"),
        (["--output-len", "2"], "--output-len must be at least 8"),
        (["--prompts", "nowhere.jsonl"], "--prompts nowhere.jsonl: No such file"),
        (["--speculative-algorithm", "NGRAM", "--eagle-topk", "2"], "--speculative-eagle-topk must be 1 without a draft model"),
        (["--context-length", "64"], "need 2.. tokens with drafts, the context has 64"),
    ],
)
def test_bad_input(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        bench_spec.run(arguments)


def test_prompts_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "import os"}\n\n{"prompt": "def f():"}\n')
    assert bench_spec.read_prompts(str(file)) == ["import os", "def f():"]
    bad = {"\n": "no prompt in it", "{": "line 1: is not JSON", '{"prompt": 3}': 'must be an object with a text as "prompt"'}
    for text, message in bad.items():
        file.write_text(text)
        with pytest.raises(ConfigError, match=message):
            bench_spec.read_prompts(str(file))


def test_the_demo_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, prompts_file = tmp_path / "out.json", tmp_path / "prompts.jsonl"
    prompts_file.write_text("".join(json.dumps({"prompt": f"import os\n\ndef read_{i}(path):\n"}) + "\n" for i in range(3)))
    grid_options = ["--num-steps", "2", "--eagle-topk", "1,2", "--batch-sizes", "1,2", "--num-draft-tokens", "4,9"]
    sizes = ["--input-len", "16", "--output-len", "8", "--rounds", "1", "--prompts", str(prompts_file), "--output-file", str(file)]
    assert bench_spec.run([*grid_options, *sizes]) == 0
    made, shown = json.loads(file.read_text()), capsys.readouterr().out
    assert [(each["batch_size"], each["num_steps"], each["eagle_topk"], each["num_draft_tokens"]) for each in made["cells"]] == [
        (batch, *shape) for batch in (1, 2) for shape in ((0, 1, 1), (2, 1, 3), (2, 2, 4))
    ]
    for cell in made["cells"]:
        assert cell["same_text"] is True and cell["parts_ms"].keys() == set(grid.PARTS)
        assert cell["overhead"] == pytest.approx(cell["accept_length"] / cell["speedup"], rel=1e-2)
        assert cell["parts_ms"]["verify"] > 0 and (cell["num_steps"] == 0 or cell["parts_ms"]["draft"] > 0)
    assert len(made["best"]) == 2 and shown.count("best for") == 2
    assert made["notes"] == ["skipped: 2 steps, topk 2, 9 draft tokens: such a tree has 6 nodes, beside the last token"]


def test_synthetic_acceptance(capsys: pytest.CaptureFixture[str]) -> None:
    """All drafts of a chain are accepted: as many tokens in each verification."""
    sizes = ["--num-steps", "1,3", "--batch-sizes", "2", "--input-len", "16", "--output-len", "12", "--rounds", "1"]
    bench_spec.run([*sizes, "--speculative-synthetic-acceptance", "2,3,4"])
    shown = capsys.readouterr().out
    lengths = [line.split("chain")[1].split()[1] for line in shown.splitlines() if " chain " in line]
    assert lengths == ["2.00", "4.00"] and "SYNTHETIC ACCEPTANCE" in shown
