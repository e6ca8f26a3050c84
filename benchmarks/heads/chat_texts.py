"""Conversations whose answers are the model's own, with its hidden states: a draft model for chat is trained on and measured with them.

    python benchmarks/heads/chat_texts.py --model smollm2 --out texts

mtpserve answers many prompts at once, in bfloat16; the hidden states are those that its steps compute. Some conversations go on with a
second question. OUT gets a file for each part of the prompts; a further run goes on after the last one.
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from chat_prompts import prompts
from safetensors.torch import save_file
from torch import Tensor

from mtpserve.core.batch import Batch, Hidden, VerifyOutput
from mtpserve.core.sampling import SamplingParams
from mtpserve.llm import LLM
from mtpserve.runtime.step import Step

AFTER = (
    "Can you make that shorter?", "Give me an example.", "Can you explain that again, in other words?", "Thank you!", "Why?",
    "Tell me more.",    "What is the most important point?", "Make a list of the main points.", "Are you sure?", "What should I do next?",
)  # fmt: skip
WARM = 0.7  # temperature of the answers that are sampled


@dataclass
class Recorder:
    """Keeps what the steps compute: of each row its seat, its position, its token, and its hidden state after the final norm."""

    step: Step
    rows: list[tuple[Tensor, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        forward = self.step.forward

        def recorded(batch: Batch) -> tuple[Hidden, VerifyOutput, Tensor]:
            result = forward(batch)
            rows = (batch.token_req_indices, batch.positions, batch.input_ids, result[0].head.bfloat16())
            self.rows.append(tuple(row.clone() for row in rows))
            return result

        self.step.forward = recorded  # type: ignore[method-assign]

    def texts(self) -> dict[tuple[int, ...], Tensor]:
        """By its tokens, the hidden states [tokens, hidden] of each text since the last call."""
        seats, positions, ids, hidden = (torch.cat(parts) for parts in zip(*self.rows, strict=True))
        self.rows.clear()
        order = seats.argsort(stable=True)  # a seat's rows stay in the order of time
        positions, ids, hidden = positions[order], ids[order], hidden[order]
        starts = (positions == 0).nonzero().flatten().tolist()
        ends = [*starts[1:], len(ids)]
        return {tuple(ids[start:end].tolist()): hidden[start:end] for start, end in zip(starts, ends, strict=True)}


@dataclass(frozen=True)
class Conversation:
    prompt: int  # tokens
    tokens: tuple[int, ...]  # those that the model has read: not its last one


class Writer:
    """Asks a model."""

    def __init__(self, llm: LLM, length: int, tokens: int) -> None:
        self.llm, self.length, self.tokens = llm, length, tokens

    def answers(self, talks: list[list[dict[str, Any]]], warm: list[bool], seed: int) -> list[tuple[list[int], list[int]]]:
        """Of each conversation the prompt and the answer, as tokens."""
        tokenizer = self.llm.tokenizer
        starts = [tokenizer.encode(tokenizer.render_chat(talk).text) for talk in talks]
        params = [
            SamplingParams(
                max_tokens=max(1, min(self.tokens, self.length - len(start) - 1)),
                temperature=WARM if is_warm else 0.0, top_p=0.95 if is_warm else 1.0, seed=seed,
            )
            for start, is_warm in zip(starts, warm, strict=True)
        ]  # fmt: skip
        return [(start, answer.tokens) for start, answer in zip(starts, self.llm.generate(starts, params), strict=True)]

    def conversations(self, part: list[str], seed: int, further: int, sampled: float) -> list[Conversation]:
        """One for each prompt. `sampled`: the part of the answers that is; every `further`-th conversation has a second question."""
        choose = random.Random(seed)
        warm = [choose.random() < sampled for _ in part]
        talks: list[list[dict[str, Any]]] = [[{"role": "user", "content": prompt}] for prompt in part]
        first = self.answers(talks, warm, seed)
        result = [Conversation(len(start), (*start, *answer[:-1])) for start, answer in first]
        more = [number for number, talk in enumerate(result) if further and number % further == 0 and len(talk.tokens) < self.length - 100]
        for number in more:
            answer = self.llm.tokenizer.decode(first[number][1])
            talks[number] += [{"role": "assistant", "content": answer}, {"role": "user", "content": choose.choice(AFTER)}]
        second = self.answers([talks[number] for number in more], [warm[number] for number in more], seed) if more else []
        for number, (start, answer) in zip(more, second, strict=True):
            result[number] = Conversation(result[number].prompt, (*start, *answer[:-1]))
        return result


def save(path: Path, talks: list[Conversation], texts: dict[tuple[int, ...], Tensor]) -> int:
    """`texts` may have more: the first part of what went on. Returns the number of tokens."""
    tensors = {
        "ids": torch.tensor([token for talk in talks for token in talk.tokens], dtype=torch.int32),
        "hidden": torch.cat([texts[talk.tokens] for talk in talks]),
        "lengths": torch.tensor([len(talk.tokens) for talk in talks]),
        "prompts": torch.tensor([talk.prompt for talk in talks]),
    }
    save_file(tensors, path.with_suffix(".part"))
    path.with_suffix(".part").rename(path)
    return len(tensors["ids"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--held-out", action="store_true", help="the prompts that are held out")
    parser.add_argument("--prompts", type=int, help="how many (default: all)")
    parser.add_argument("--first", type=int, default=0, help="leave out as many of them")
    parser.add_argument("--tokens", type=int, default=256, help="of an answer, at most")
    parser.add_argument("--length", type=int, default=512, help="tokens of a conversation, at most")
    parser.add_argument("--further", type=int, default=6, help="every so many conversations have a second question (0: none)")
    parser.add_argument("--sampled", type=float, default=1 / 3, help="the part of the answers that is sampled and not greedy")
    parser.add_argument("--part", type=int, default=256, help="conversations of a file")
    parser.add_argument("--running", type=int, default=128, help="conversations at a time")
    parser.add_argument("--quantization", default="auto", help="int8: faster on a CPU, and not quite the model's own words")
    parser.add_argument("--cpu-threads", type=int)
    args = parser.parse_args()
    options = {"speculative_algorithm": "none", "max_running_requests": args.running, "context_length": args.length}
    options |= {"cpu_threads": args.cpu_threads, "disable_radix_cache": True, "quantization": args.quantization}
    args.out.mkdir(parents=True, exist_ok=True)
    everything = prompts(args.prompts, unseen=args.held_out)[args.first :]
    began, tokens = time.perf_counter(), 0
    with LLM(args.model, dtype="bfloat16", **options) as llm:
        recorder, writer = Recorder(llm.engine.runner.step), Writer(llm, args.length, args.tokens)
        for number, start in enumerate(range(0, len(everything), args.part)):
            if (path := args.out / f"{number:03}.safetensors").exists():
                continue
            seed = args.first // args.part + number
            talks = writer.conversations(everything[start : start + args.part], seed, args.further, args.sampled)
            tokens += save(path, talks, recorder.texts())
            print(f"{path}: {tokens} tokens, {tokens / (time.perf_counter() - began):.0f} tokens/s", flush=True)


if __name__ == "__main__":
    main()
