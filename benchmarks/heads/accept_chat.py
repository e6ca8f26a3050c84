"""How many drafts of a chat model's MTP layer the engine accepts, on prompts that the layer was not trained with:

    python benchmarks/heads/accept_chat.py --model smollm2 --layer mtpserve/demo/smollm2-nextn

Three drafts at a time, greedy; each answer is compared with plain decoding's. The figures are added to LAYER/training.json.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from chat_prompts import prompts

from mtpserve.core.sampling import SamplingParams, Speculation
from mtpserve.llm import LLM
from mtpserve.text.outputs import Completion

STEPS = 3
TOKEN_MAP = "token_map.json"


def answers(args: argparse.Namespace, **options: Any) -> list[Completion]:
    sampling = SamplingParams(max_tokens=args.tokens, temperature=0, speculation=Speculation(trace=True))
    options |= {"context_length": 1024, "max_running_requests": 16, "cpu_threads": args.cpu_threads}
    with LLM(args.model, dtype="bfloat16", **options) as llm:
        talks = [[{"role": "user", "content": prompt}] for prompt in prompts(args.prompts, unseen=True)]
        return llm.generate([llm.tokenizer.encode(llm.tokenizer.render_chat(talk).text) for talk in talks], sampling)


def figures(found: list[Completion]) -> dict[str, Any]:
    """The share of verifications in which 1, 2, … STEPS drafts are accepted, and the tokens of a verification."""
    lengths = [len(proposal.path) for each in found for proposal in each.trace if proposal.tokens]
    shares = [sum(length > place for length in lengths) / len(lengths) for place in range(STEPS)]
    return {
        "prompts": len(found), "tokens": sum(len(each.tokens) for each in found), "verifications": len(lengths),
        "accepted_by_position": [round(share, 4) for share in shares], "acceptance_length": round(1 + sum(shares), 4),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--layer", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128, help="of an answer, at most")
    parser.add_argument("--cpu-threads", type=int)
    args = parser.parse_args()
    options = {"speculative_draft_model_path": str(args.layer), "speculative_num_steps": STEPS, "speculative_adaptive": False}
    options["speculative_token_map"] = str(args.layer / TOKEN_MAP)
    found, plain = answers(args, speculative_algorithm="NEXTN", **options), answers(args, speculative_algorithm="none")
    measured = figures(found) | {"same_answers": sum(a.tokens == b.tokens for a, b in zip(found, plain, strict=True))}
    file = args.layer / "training.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | measured, indent=2) + "\n")
    print(json.dumps(measured))


if __name__ == "__main__":
    main()
