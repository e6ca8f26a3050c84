"""The options of speculation, checked as far as that is possible without the model."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mtpserve.config.drafters import DRAFTERS, SEPARATE, SPEC_TYPES
from mtpserve.config.options import check, option

# Without an algorithm they are the default drafter's: an error where there is none.
NEED_DRAFTER = (
    "speculative_num_steps", "speculative_num_draft_tokens", "speculative_draft_model_path",
    "speculative_eagle_topk",
    "speculative_token_map", "speculative_synthetic_acceptance", "speculative_disable_by_batch_size",
)  # fmt: skip
# values of --speculative-algorithm: the model's own MTP layer if it has one; plain decoding
AUTO, NONE = "auto", "none"
MAX_ROWS = 56  # a request's nodes, the free drafts included, are bits of one 64-bit number


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecConfig:
    speculative_algorithm: str | None = option(
        None,
        "source of drafts. MTP, NEXTN: the checkpoint's MTP layer; EAGLE: the MTP layer, or the head "
        "in --speculative-draft-model-path; EAGLE3, MEDUSA, DFLASH, FROZEN_KV_MTP, STANDALONE: the head or "
        "model in --speculative-draft-model-path; NGRAM: earlier text, without a model; MTP+NGRAM, "
        "EAGLE3+NGRAM, …: both in one tree; none: no drafts (default: auto: MTP if the checkpoint "
        "has a usable MTP layer, else none)",
        "speculative-algo",
        "spec-method",
        synonyms=SPEC_TYPES,
    )
    speculative_num_steps: int | None = option(
        None, (
            "maximum number of drafts in a row, 0 to 7 (default: 3; at most the number of MTP layers if "
            "each depth has its own layer)"
        ),
        "num-speculative-tokens", "spec-tokens", "max-draft-len", "spec-draft-n-max",
    )  # fmt: skip
    speculative_eagle_topk: int | None = option(
        None, "branches per draft step, 1 to 8; 1: a chain, more: a tree (default: 1)"
    )
    speculative_num_draft_tokens: int | None = option(
        None,
        f"size of the verified tree with its root, at most {MAX_ROWS} (default: num-steps * topk + 1; "
        "always num-steps + 1 for a chain)",
    )
    speculative_adaptive: bool = option(
        True,
        "choose the draft length at run time, from 0 to --speculative-num-steps; off: always the maximum",
    )
    speculative_disable_by_batch_size: int | None = option(
        None, (
            "stop drafting while more requests than this run; sampled text may then depend on the load "
            "(default: always draft)"
        ),
        "max-concurrency",
    )  # fmt: skip
    speculative_draft_model_path: str | None = option(
        None,
        "directory or Hugging Face id of a separate NextN layer, head or draft model (default: the "
        "model's own MTP layer)",
        "speculative-draft-model", "spec-model",
    )  # fmt: skip
    speculative_draft_model_quantization: str = option(
        "auto",
        "number format of the draft layer and head on a CPU: int8, none, or auto (int8 where it is "
        "faster). The output stays the same: drafts are verified",
        choices=("auto", "int8", "none"),
    )
    speculative_token_map: str | None = option(
        None,
        "file with the token ids that the draft head may draft: a smaller head is faster. `mtpserve "
        "inspect --token-map` writes the file (default: all tokens)",
    )
    speculative_accept_threshold_single: float = option(
        1.0,
        "LOSSY below 1: accept a draft if the target model gives it at least this probability; the "
        "output distribution changes",
    )
    speculative_accept_threshold_acc: float = option(
        1.0,
        "LOSSY below 1: accept one of a node's drafts with probability min(1, their summed "
        "probability / this); the output distribution changes",
    )
    speculative_synthetic_acceptance: str | None = option(
        None,
        "NOT FOR SERVING: accept drafts at random, for measurements. The value is a published curve "
        "(glm-5.2-mtp, deepseek-r1-mtp, …), acceptance lengths for 1, 2, … drafts (1.84,2.50,2.99), "
        "or a JSON file with them",
    )
    speculative_exact: bool = option(
        False,
        "make greedy output bitwise equal to decoding without drafts, in bfloat16 too (slower; the "
        "CPU kernels always do this)",
    )

    def __post_init__(self) -> None:
        algorithm, steps, rows = (
            self.speculative_algorithm,
            self.speculative_num_steps,
            self.speculative_num_draft_tokens,
        )
        topk, max_bs = self.speculative_eagle_topk, self.speculative_disable_by_batch_size
        is_known = all(component in (*DRAFTERS.entries, "NGRAM") for component in self.parts)
        apart = is_known and len(self.parts) == (self.drafter is not None) + self.ngram
        names = (
            f"{AUTO}, {NONE}, {', '.join(DRAFTERS.entries)}, NGRAM, or a draft model and NGRAM, like "
            f"MTP+NGRAM"
        )
        check(apart, "speculative_algorithm", algorithm, names)
        for name in self.drafter_options if self.named and not self.parts else ():
            check(False, name, getattr(self, name), "left out with --speculative-algorithm none")
        path = self.speculative_draft_model_path
        check(
            path is not None or self.drafter not in SEPARATE,
            "speculative_draft_model_path",
            path,
            f"the draft model of {algorithm}",
        )
        check(steps is None or 0 <= steps <= 7, "speculative_num_steps", steps, "in [0, 7]")
        check(topk is None or 1 <= topk <= 8, "speculative_eagle_topk", topk, "in [1, 8]")
        check(
            rows is None or 1 <= rows <= MAX_ROWS, "speculative_num_draft_tokens", rows, f"in [1, {MAX_ROWS}]"
        )
        check(max_bs is None or max_bs >= 1, "speculative_disable_by_batch_size", max_bs, "at least 1")
        check(
            topk in (None, 1) or not self.named or self.drafter is not None,
            "speculative_eagle_topk",
            topk,
            "1 without a draft model",
        )
        if rows is not None and topk in (None, 1):
            check(rows <= 8, "speculative_num_draft_tokens", rows, "at most 8 for a chain")
            length = rows if steps is None else steps + 1
            check(
                rows == length, "speculative_num_draft_tokens", rows, f"num-steps + 1 = {length} for a chain"
            )
        for name in ("speculative_accept_threshold_single", "speculative_accept_threshold_acc"):
            threshold = getattr(self, name)
            check(0 < threshold <= 1, name, threshold, "in (0, 1]")
            check(
                threshold == 1 or self.speculative_synthetic_acceptance is None,
                name,
                threshold,
                "1 with --speculative-synthetic-acceptance",
            )
        if self.named:
            tokens = self.speculative_token_map
            check(
                tokens is None or self.drafter is not None,
                "speculative_token_map",
                tokens,
                "left out without a draft model",
            )

    @property
    def named(self) -> bool:
        """What drafts is said, be it nothing; else the model decides, see engine/startup/drafter.py. Until it
        has, nothing drafts."""
        return self.speculative_algorithm is not None and self.speculative_algorithm.lower() != AUTO

    @property
    def drafter_options(self) -> list[str]:
        """The options that were given and mean something only where something drafts."""
        # no drafts: nobody needs a drafter for that
        return [name for name in NEED_DRAFTER if getattr(self, name) not in (None, 0)]

    @property
    def exact(self) -> bool:
        return self.speculative_exact

    @property
    def parts(self) -> list[str]:  # vLLM's names of MTP begin with the family: deepseek_mtp, mimo_mtp
        if not self.named or (algorithm := (self.speculative_algorithm or "").upper()) == NONE.upper():
            return []
        parts = algorithm.split("+")
        return ["MTP" if part.endswith("_MTP") and part not in DRAFTERS.entries else part for part in parts]

    @property
    def drafter(self) -> str | None:
        """The draft model's name in config.drafters; None: no draft model."""
        return next((component for component in self.parts if component != "NGRAM"), None)

    @property
    def ngram(self) -> bool:
        return "NGRAM" in self.parts

    @property
    def steps(self) -> int:
        """Depth of the drafts: 0 is plain decoding."""
        if not self.parts:
            return 0
        if self.speculative_num_steps is not None:
            return self.speculative_num_steps
        rows = self.speculative_num_draft_tokens
        return 3 if rows is None or self.topk > 1 else rows - 1

    @property
    def depth_told(self) -> bool:
        return self.speculative_num_steps is not None or self.speculative_num_draft_tokens is not None

    def drafting_with(self, algorithm: str) -> SpecConfig:
        return replace(self, speculative_algorithm=algorithm)

    @property
    def checkpoint(self) -> str | None:
        """Directory or id of a separately published draft layer; None: it is in the model's own
        checkpoint."""
        return self.speculative_draft_model_path

    def with_checkpoint(self, directory: str | None) -> SpecConfig:
        return replace(self, speculative_draft_model_path=directory)

    @property
    def adaptive(self) -> bool:
        """Depths are chosen while serving. Not where the text depends on the drafts."""
        return self.speculative_adaptive and self.steps > 0 and not self.lossy

    @property
    def topk(self) -> int:
        return self.speculative_eagle_topk or 1

    @property
    def nodes(self) -> int:
        """Drafts verified per request, without the free ones."""
        rows = self.speculative_num_draft_tokens
        if self.topk == 1:
            return self.steps
        # A tree's pool: topk candidates in the first step, topk for each of topk nodes in each further step.
        pool = self.topk + max(self.steps - 1, 0) * self.topk**2 if self.steps else 0
        return min(pool, MAX_ROWS - 1, (self.topk * self.steps) if rows is None else rows - 1)

    @property
    def lossy(self) -> bool:
        return min(self.speculative_accept_threshold_single, self.speculative_accept_threshold_acc) < 1
