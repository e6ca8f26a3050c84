"""`mtpserve prove`: run a model with and without speculation and show that its output is the same. Exit code
0 only when all holds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtpserve.cli.options import Values, add_options, all_options, dashed, parsed_values, settings
from mtpserve.cli.parser import Parser
from mtpserve.config import ENGINE_SECTIONS
from mtpserve.core.errors import ConfigError

if TYPE_CHECKING:
    from mtpserve.tools.prove.divergence import Divergence
    from mtpserve.tools.prove.proof import Excuse, Proof

TOKENS, DRAWS = 64, 300
SHOWN = 8  # divergences
# Options that say which model it is and where: a proof without them is another one.
WHICH = (
    "model", "tokenizer", "revision", "download_dir", "load_format", "device", "served_model_name",
    "max_total_tokens",
    "mem_fraction_static", "speculative_algorithm", "speculative_draft_model_path", "random_seed",
)  # fmt: skip


def parser() -> Parser:
    arg_parser = Parser(
        prog="mtpserve prove",
        usage="%(prog)s [options]",
        description="Compare a model's output with speculation to its output without speculation.",
    )
    arg_parser.add_argument(
        "--prompts",
        metavar="FILE",
        help="file with prompts, one JSON string or plain text per line (default: a built-in set)",
    )
    arg_parser.add_argument(
        "--tokens",
        metavar="N",
        type=int,
        default=TOKENS,
        help=f"number of greedy tokens per prompt (default: {TOKENS})",
    )
    arg_parser.add_argument(
        "--draws",
        metavar="N",
        type=int,
        default=DRAWS,
        help=f"number of samples per sampling feature, with speculation and without (default: {DRAWS})",
    )
    arg_parser.add_argument(
        "--tie", metavar="GAP", type=float,
        help=(
            "accept greedy differences between tokens whose log-probabilities differ by at most X; 0: "
            "accept none (default: the measured rounding error of --dtype)"
        ),
    )  # fmt: skip
    arg_parser.add_argument("--json", metavar="FILE", help="file for all results, as JSON")
    arg_parser.add_argument("--quiet", action="store_true", help="show no progress")
    add_options(arg_parser, ENGINE_SECTIONS)
    return arg_parser


def run(arguments: Sequence[str]) -> int:
    options = parser().parse(arguments)
    for name in ("tokens", "draws"):
        if getattr(options, name) < 1:
            raise ConfigError(f"--{name} must be at least 1, got {getattr(options, name)}")
    values = parsed_values(options)
    if "record_steps" in values:
        raise ConfigError(
            "--record-steps must be left out: prove runs several engines; use it with launch or generate"
        )
    # what the options rule out is said before anything loads
    adapters = settings(values).engine.lora.requests
    from mtpserve.tools.prove.proof import PROMPTS, prove
    from mtpserve.tools.prove.proof_progress import ProofProgress

    prompts = PROMPTS if options.prompts is None else read_prompts(options.prompts)
    results: dict[str, dict[str, Any]] = {}  # by the adapter's name, "" the model's
    for adapter in (None, *adapters):
        with ProofProgress(options.quiet) as progress:
            proof = prove(
                dict(values),
                prompts,
                tokens=options.tokens,
                draws=options.draws,
                tie=options.tie,
                lora_request=adapter,
                progress=progress,
            )
        if adapter is not None:
            print(f"adapter     {adapter.lora_name}")
        steps = [] if proof.holds else next_steps(proof, values, options.tie)
        show(proof, steps, options.tie)
        results["" if adapter is None else adapter.lora_name] = as_json(proof) | {"next": steps}
    if options.json:
        of_model = results.pop("")
        report = of_model | ({"adapters": results} if adapters else {})
        Path(options.json).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        results[""] = of_model
    return 0 if all(result["holds"] for result in results.values()) else 1


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


def show(proof: Proof, steps: Sequence[str] = (), tie: float | None = None) -> None:
    """`steps`: what to try next. `tie`: --tie."""
    print(f"drafter     {proof.drafting}")
    differing = {divergence.prompt for divergence in proof.divergences}
    print(f"greedy      {proof.prompts - len(differing)} of {proof.prompts} prompts give the same text")
    for divergence in sorted(proof.divergences, key=lambda divergence: -divergence.gap)[:SHOWN]:
        other = (
            "not among the likeliest"
            if divergence.speculative_logprob is None
            else f"{divergence.speculative_logprob:.5f}"
        )
        print(
            f"            prompt {divergence.prompt}, token {divergence.place}: "
            f"plain {divergence.plain} ({divergence.plain_logprob:.5f}), "
            f"speculative {divergence.speculative} ({other}): {judged(divergence, proof, tie)}"
        )
    if len(proof.divergences) > SHOWN:
        print(f"            and {len(proof.divergences) - SHOWN} more, with smaller gaps")
    print("sampled     feature                 draws  p-value  same text")
    for law in proof.laws:
        share = "-" if law.same_text is None else f"{law.same_text:.1%}"
        differs = not law.holds or (proof.excuse is None and law.same_text not in (None, 1.0))
        print(
            f"            {law.feature:22} {law.draws:6} {law.p_value:8.4f}  {share:>9}  "
            f"{'DIFFERS' if differs else ''}".rstrip()
        )
    if proof.excuse is not None:
        show_excuse(proof.excuse, proof.tie)
        if not proof.excuse.rounding.explains_gaps(
            [divergence.gap for divergence in proof.divergences], proof.excuse.tokens.of
        ):
            print(
                "            the gaps above are larger, or large ones more frequent, than rounding "
                "explains: DIFFERS"
            )
    if (line := forgiven(proof)) is not None:
        print(f"forgiven    {line}")
    rates = [
        f"{accepted / drafted:.2f}"
        for drafted, accepted in zip(proof.drafted, proof.accepted, strict=True)
        if drafted
    ]
    print(
        f"acceptance  {proof.accept_length:.2f} tokens per verification; share of the drafts at "
        f"depth 1, 2, …: {', '.join(rates)}"
    )
    if proof.lossy:
        print("lossy       acceptance thresholds below 1: the output is not meant to be the model's")
    beyond = " beyond rounding" if proof.excuse is not None or proof.divergences else ""
    print(f"verdict     {f'holds: speculation changes nothing{beyond}' if proof.holds else 'DOES NOT HOLD'}")
    for number, step in enumerate(steps):
        print(f"{'' if number else 'next':12}{step}")


def judged(divergence: Divergence, proof: Proof, tie: float | None) -> str:
    apart = "" if divergence.gap == float("inf") else f"{divergence.gap:.2g} apart, "
    if divergence.gap <= proof.tie:
        return (
            f"{apart}tie within "
            f"{f'rounding, which explains up to {proof.tie:.2g}' if tie is None else f'--tie {tie:g}'}"
        )
    if proof.excuse is not None:
        return f"{apart}DIFFERS: rounding explains up to {proof.tie:.2g}"
    return f"{apart}DIFFERS" + (
        ": the numbers are exact, so that nothing is excused" if tie is None else f": --tie is {tie:g}"
    )


def forgiven(proof: Proof) -> str | None:
    """Returns what was excused; None: nothing was."""
    ties = [divergence.gap for divergence in proof.divergences if divergence.gap <= proof.tie]
    texts = 0 if proof.excuse is None else proof.excuse.texts.count
    if not proof.holds or not (ties or texts):
        return None
    parts = (
        [f"{len(ties)} tie{'s' * (len(ties) > 1)} in greedy texts, {max(ties):.2g} apart at most"]
        if ties
        else []
    )
    parts += [f"{texts} sampled texts with the same seed"] if texts else []
    why = (
        ""
        if proof.excuse is None
        else ": rounding explains as many and as large ones, and in exact mode all of them are the same"
    )
    return f"{', '.join(parts)}{why}"


def show_excuse(excuse: Excuse, tie: float) -> None:
    rounding = excuse.rounding

    def line(what: str, holds: bool = True) -> None:
        print(f"            {what}{'' if holds else ': DIFFERS'}")

    scaled = f", scaled by {rounding.scale:.1e}" if rounding.scale != 1 else ""
    print(
        f"rounding    what {rounding.dtype} alone does to plain decoding was measured against "
        f"{rounding.reference}{scaled}:"
    )
    errors = (
        f"by {rounding.typical:.2g} at half of {len(rounding.errors)} places, by "
        f"{rounding.bound / 2:.2g} at most"
    )
    line(f"it changes the gap between two likely tokens' log-probabilities {errors};")
    line(f"two ways to compute the same differ by up to twice that, so a gap of up to {tie:.2g} can be a tie")
    for what, ours, its in (
        ("greedy tokens", excuse.tokens, rounding.tokens),
        ("sampled texts", excuse.texts, rounding.texts),
    ):
        alone = its.count * rounding.scale / max(its.of, 1)
        line(f"{what}: {ours.count} of {ours.of} differ with speculation; {alone:.2%} do by rounding "
f"alone, up to twice that is expected",
             rounding.explains(ours, its))  # fmt: skip
    same, of = excuse.exact.of - excuse.exact.count, excuse.exact.of
    line(
        f"in exact mode, where sums do not depend on the batch, {same} of the {of} requests that "
        f"differ give the same text",
        same == of,
    )


def next_steps(proof: Proof, values: Values, tie: float | None) -> list[str]:
    """Returns what to try next, one line each, the first first. `values`: the given options; `tie`: --tie."""
    if proof.lossy:
        return [
            "leave out --speculative-accept-threshold-single and -acc: below 1 they accept what the "
            "model would not say"
        ]
    if tie is not None:
        return ["without --tie: what rounding explains is then measured, and anything beyond it shown"]
    steps = []
    if any(not law.holds for law in proof.laws):
        draws = max(law.draws for law in proof.laws)
        steps.append(
            f"--draws {4 * draws}: one test in 10,000 fails by chance, and then not again; a defect "
            f"fails more clearly"
        )
    if proof.excuse is not None and proof.excuse.exact.count == 0:
        return steps + of_numbers(values)
    return steps + of_logic(values)


def of_numbers(values: Values) -> list[str]:
    """Exact mode gives the same texts: drafts are chosen and verified rightly, and what the ordinary mode
    computes is suspected."""
    steps = []
    if values.get("dtype") != "float32":
        steps.append(
            "--dtype float32: it rounds 65,536 times less than bfloat16; what still differs then is "
            "no rounding"
        )
    if values.get("attention_backend") != "reference":
        steps.append("--attention-backend reference: plain torch; if that holds, a kernel is at fault")
    return [
        *steps,
        *one_by_one(values),
        "--speculative-exact serves this model with the texts of plain decoding, and slower",
    ]


def of_logic(values: Values) -> list[str]:
    """Texts differ where numbers do not depend on what is computed with them."""
    steps = [
        "--speculative-num-steps 1 --speculative-eagle-topk 1: the shortest chain; if that holds, "
        "depth or branches are at fault"
    ]
    steps += one_by_one(values)
    record = (
        "mtpserve generate PROMPT --temperature 0 --record-steps FILE, with these options, and mtpserve "
        "replay FILE"
    )
    return [
        *steps,
        f"{record}: whether each step gives the same again; the file and --json's belong into a report",
    ]


def one_by_one(values: Values) -> list[str]:
    """Advises to leave options out one by one; empty if no option was given that could change a text."""
    # a config file may have the server's, too
    engines = {option.name for option in all_options(ENGINE_SECTIONS)}
    flags = [f"--{dashed(name)}" for name in values if name in engines.difference(WHICH)]
    return [f"without {', '.join(flags)}, one after the other: which of them it takes"] if flags else []
