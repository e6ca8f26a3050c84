"""`mtpserve prove`: run a model with and without speculation and show that its output is the same. Exit code 0 only when all holds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtpserve.cli.options import add_options, given, settings
from mtpserve.cli.parser import Parser
from mtpserve.config import ENGINE_SECTIONS
from mtpserve.core.errors import ConfigError

if TYPE_CHECKING:
    from mtpserve.proof import Excuse, Proof

TOKENS, DRAWS = 64, 300
SHOWN = 8  # divergences


def parser() -> Parser:
    made = Parser(
        prog="mtpserve prove", usage="%(prog)s [options]", description="Compare a model's output with speculation to its output without."
    )
    made.add_argument("--prompts", metavar="FILE", help="prompts, one JSON string or plain text per line (default: a built-in set)")
    made.add_argument("--tokens", metavar="N", type=int, default=TOKENS, help=f"greedy tokens per prompt (default: {TOKENS})")
    made.add_argument("--draws", metavar="N", type=int, default=DRAWS, help=f"draws per sampling feature and side (default: {DRAWS})")
    made.add_argument(
        "--tie", metavar="GAP", type=float,
        help="excuse greedy divergences between tokens whose log-probabilities differ by no more, and nothing else: 0 excuses nothing "
        "(default: what rounding in --dtype is measured to explain)",
    )  # fmt: skip
    made.add_argument("--json", metavar="FILE", help="write all results here")
    add_options(made, ENGINE_SECTIONS)
    return made


def run(arguments: Sequence[str]) -> int:
    chosen = parser().parse(arguments)
    for name in ("tokens", "draws"):
        if getattr(chosen, name) < 1:
            raise ConfigError(f"--{name} must be at least 1, got {getattr(chosen, name)}")
    values = given(chosen)
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
    differing = {each.prompt for each in proof.divergences}
    print(f"greedy      {proof.prompts - len(differing)} of {proof.prompts} prompts give the same text")
    for each in sorted(proof.divergences, key=lambda each: -each.gap)[:SHOWN]:
        other = "not among the likeliest" if each.speculative_logprob is None else f"{each.speculative_logprob:.5f}"
        verdict = "tie within rounding" if each.gap <= proof.tie else "DIFFERS"
        print(f"            prompt {each.prompt}, token {each.place}: plain {each.plain} ({each.plain_logprob:.5f}), "
              f"speculative {each.speculative} ({other}): {verdict}")  # fmt: skip
    if len(proof.divergences) > SHOWN:
        print(f"            and {len(proof.divergences) - SHOWN} more, with smaller gaps")
    print("sampled     feature                 draws  p-value  same text")
    for law in proof.laws:
        share = "-" if law.same_text is None else f"{law.same_text:.1%}"
        differs = not law.holds or (proof.excuse is None and law.same_text not in (None, 1.0))
        print(f"            {law.feature:22} {law.draws:6} {law.p_value:8.4f}  {share:>9}  {'DIFFERS' if differs else ''}".rstrip())
    if proof.excuse is not None:
        show_excuse(proof.excuse, proof.tie)
        if not proof.excuse.rounding.explains_gaps([each.gap for each in proof.divergences], proof.excuse.tokens.of):
            print("            the gaps above are larger, or large ones more frequent, than rounding explains: DIFFERS")
    rates = [f"{accepted / drafted:.2f}" for drafted, accepted in zip(proof.drafted, proof.accepted, strict=True) if drafted]
    print(f"acceptance  {proof.accept_length:.2f} tokens per verification; share of the drafts at depth 1, 2, …: {', '.join(rates)}")
    if proof.lossy:
        print("lossy       acceptance thresholds below 1: the output is not meant to be the model's")
    beyond = " beyond rounding" if proof.excuse is not None or proof.divergences else ""
    print(f"verdict     {f'holds: speculation changes nothing{beyond}' if proof.holds else 'DOES NOT HOLD'}")


def show_excuse(excuse: Excuse, tie: float) -> None:
    rounding = excuse.rounding

    def line(what: str, holds: bool = True) -> None:
        print(f"            {what}{'' if holds else ': DIFFERS'}")

    scaled = f", scaled by {rounding.scale:.1e}" if rounding.scale != 1 else ""
    print(f"rounding    what {rounding.dtype} alone does to plain decoding was measured against {rounding.reference}{scaled}:")
    errors = f"by {rounding.typical:.2g} at half of {len(rounding.errors)} places, by {rounding.bound / 2:.2g} at most"
    line(f"it changes the gap between two likely tokens' log-probabilities {errors};")
    line(f"two ways to compute the same differ by up to twice that, so a gap of up to {tie:.2g} can be a tie")
    for what, ours, its in (("greedy tokens", excuse.tokens, rounding.tokens), ("sampled texts", excuse.texts, rounding.texts)):
        alone = its.count * rounding.scale / max(its.of, 1)
        line(f"{what}: {ours.count} of {ours.of} differ with speculation; {alone:.2%} do by rounding alone, up to twice that is expected",
             rounding.explains(ours, its))  # fmt: skip
    same, of = excuse.exact.of - excuse.exact.count, excuse.exact.of
    line(f"in exact mode, where sums do not depend on the batch, {same} of the {of} requests that differ give the same text", same == of)
