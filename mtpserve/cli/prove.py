"""`mtpserve prove`: run a model with and without speculation and show that its output is the same. Exit code 0 only when all holds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtpserve.cli.generate import with_drafts
from mtpserve.cli.options import add_options, given, settings
from mtpserve.cli.parser import Parser
from mtpserve.config import SECTIONS
from mtpserve.core.errors import ConfigError

if TYPE_CHECKING:
    from mtpserve.proof import Proof

TOKENS, DRAWS = 64, 300


def parser() -> Parser:
    made = Parser(
        prog="mtpserve prove", usage="%(prog)s [options]", description="Compare a model's output with speculation to its output without."
    )
    made.add_argument("--prompts", metavar="FILE", help="prompts, one JSON string or plain text per line (default: a built-in set)")
    made.add_argument("--tokens", metavar="N", type=int, default=TOKENS, help=f"greedy tokens per prompt (default: {TOKENS})")
    made.add_argument("--draws", metavar="N", type=int, default=DRAWS, help=f"draws per sampling feature and side (default: {DRAWS})")
    made.add_argument(
        "--tie", metavar="GAP", type=float, default=0.0,
        help="forgive a greedy divergence between tokens whose log-probabilities differ by no more (default: 0, forgive nothing)",
    )  # fmt: skip
    made.add_argument("--json", metavar="FILE", help="write everything that was found here")
    add_options(made, {name: config for name, config in SECTIONS.items() if name != "server"})
    return made


def run(arguments: Sequence[str]) -> int:
    chosen = parser().parse(arguments)
    for name in ("tokens", "draws"):
        if getattr(chosen, name) < 1:
            raise ConfigError(f"--{name} must be at least 1, got {getattr(chosen, name)}")
    values = with_drafts(given(chosen))
    if "record_steps" in values:
        raise ConfigError("--record-steps is for launch and generate: a proof runs several engines")
    settings(values)  # what the options rule out is said before anything loads
    from rich.console import Console
    from rich.progress import Progress

    from mtpserve.proof import PROMPTS, prove

    prompts = PROMPTS if chosen.prompts is None else read_prompts(chosen.prompts)
    with Progress(console=Console(stderr=True), transient=True) as bar:
        tasks = {name: bar.add_task(name, total=1) for name in ("plain", "speculative")}

        def progress(name: str, done: int, of: int) -> None:
            bar.update(tasks[name], completed=done, total=of)

        proof = prove(dict(values), prompts, tokens=chosen.tokens, draws=chosen.draws, tie=chosen.tie, progress=progress)
    show(proof)
    if chosen.json:
        Path(chosen.json).write_text(json.dumps(as_json(proof), indent=2) + "\n", encoding="utf-8")
    return 0 if proof.holds else 1


def read_prompts(file: str) -> list[str]:
    try:
        lines = [line for line in Path(file).read_text(encoding="utf-8").splitlines() if line.strip()]
    except OSError as error:
        raise ConfigError(f"--prompts {file}: {error.strerror}") from error
    if not lines:
        raise ConfigError(f"--prompts {file}: no prompt in it")
    return [str(json.loads(line)) if line.startswith('"') else line for line in lines]


def as_json(proof: Proof) -> dict[str, Any]:
    laws = [{**asdict(law), "holds": law.holds} for law in proof.laws]
    return {**asdict(proof), "laws": laws, "holds": proof.holds}


def show(proof: Proof) -> None:
    same = proof.prompts - len(proof.divergences)
    print(f"greedy      {same} of {proof.prompts} prompts give the same text")
    for found in proof.divergences[:8]:
        other = "not among the likeliest" if found.speculative_logprob is None else f"{found.speculative_logprob:.5f}"
        print(f"            prompt {found.prompt}, token {found.place}: plain {found.plain} ({found.plain_logprob:.5f}), "
              f"speculative {found.speculative} ({other})")  # fmt: skip
    print("sampled     feature                 draws  p-value  same text")
    for law in proof.laws:
        share = "-" if law.same_text is None else f"{law.same_text:.0%}"
        print(f"            {law.feature:22} {law.draws:6} {law.p_value:8.4f}  {share:>9}  {'' if law.holds else 'DIFFERS'}")
    rates = [f"{accepted / drafted:.2f}" for drafted, accepted in zip(proof.drafted, proof.accepted, strict=True) if drafted]
    print(f"acceptance  {proof.accept_length:.2f} tokens per verification; share of the drafts at depth 1, 2, …: {', '.join(rates)}")
    if proof.lossy:
        print("lossy       acceptance thresholds below 1: the output is not meant to be the model's")
    print(f"verdict     {'holds: speculation changes nothing' if proof.holds else 'DOES NOT HOLD'}")
