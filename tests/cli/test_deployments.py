"""Commands that docs/deploy.md shows, and those that others have published for large deployments, as far as options go."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from mtpserve.cli import launch
from mtpserve.cli.options import Settings, parsed_values, settings
from mtpserve.core.errors import ConfigError

DEPLOY = (Path(__file__).parents[2] / "docs" / "deploy.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```sh\n(.*?)^```", DEPLOY, re.MULTILINE | re.DOTALL)
LINES = [line.split("  #")[0].replace("…", "demo") for block in BLOCKS for line in block.splitlines()]
GLM = "--tool-call-parser glm45 --reasoning-parser glm45"
CHAIN = "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4"
MTP = """--speculative-config '{"method": "mtp", "num_speculative_tokens": 1}'"""


def parse(line: str) -> Settings:
    return settings(parsed_values(launch.parser().parse(shlex.split(line))))


@pytest.mark.parametrize("line", [line for line in LINES if line.startswith("mtpserve launch")])
def test_commands_that_are_shown(line: str) -> None:
    assert parse(line.removeprefix("mtpserve launch")).engine.spec.steps != 0


def test_there_are_such_commands() -> None:
    assert sum(line.startswith("mtpserve launch") for line in LINES) >= 5


@pytest.mark.parametrize(
    ("line", "ranks", "data", "spreads", "drafts"),
    [
        ("--model-path m --tp-size 8 --speculative-algorithm NEXTN --speculative-num-steps 1 --speculative-eagle-topk 1 "
         "--speculative-num-draft-tokens 2", 8, 1, False, 1),
        ("--model m --tp 8 --speculative-algorithm MTP --speculative-num-steps 3", 8, 1, False, 3),
        ("--model m --tp 8 --dp 8 --enable-dp-attention --ep 8 --speculative-algorithm MTP", 1, 8, True, None),
        ("--model m --tp-size 8 --dp-size 2 --enable-dp-attention --speculative-algorithm MTP", 4, 2, True, None),
        (f"m --tensor-parallel-size 2 --data-parallel-size 4 --enable-expert-parallel {MTP}", 2, 4, True, 1),
        (f"m --data-parallel-size 8 --enable-expert-parallel {MTP}", 1, 8, True, 1),
        (f"--model-path m --tp-size 8 {GLM} --speculative-algorithm EAGLE {CHAIN}", 8, 1, False, 3),
        (f"m --tensor-parallel-size 4 {GLM} --enable-auto-tool-choice {MTP}", 4, 1, False, 1),
        (f"m --data-parallel-size 8 {MTP}", 1, 8, False, 1),
        (f"m --tp 8 --disaggregation-mode prefill --kv-offload-gib 64 {MTP}", 8, 1, False, 1),
    ],
)  # fmt: skip
def test_published_commands(line: str, ranks: int, data: int, spreads: bool, drafts: int | None) -> None:
    engine = parse(line).engine
    parallel = engine.parallel
    assert (parallel.ranks, parallel.data_parallel_size, parallel.spreads) == (ranks, data, spreads)
    assert engine.spec.speculative_num_steps == drafts


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("--tp 16 --dp 16 --enable-dp-attention --nnodes 2", "--nnodes 2 is not possible: a server is on one machine"),
        ("--tp 8 --dp 3 --enable-dp-attention", "--tensor-parallel-size must be 1, or a multiple of --data-parallel-size, which is 3"),
        (
            "--dp 8 --enable-expert-parallel --disaggregation-mode decode --speculative-algorithm MTP",
            "the engines compute each step together",
        ),
        ("--tp 8 --ep 4", "--expert-parallel-size must be 1 or 8, the number of all engines' processes"),
        ("--enable-mtp", "use --speculative-algorithm MTP"),
    ],
)
def test_what_is_not_possible_is_said(line: str, told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse(f"--model m {line}")
    assert told in str(refused.value)
