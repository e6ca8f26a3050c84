"""Reinforcement learning with rollouts that draft: GRPO on the demo model, in plain torch, on a CPU.

python benchmarks/rollouts.py --json FILE --plot FILE.svg

Each step asks the engine for several rollouts of each prompt, rewards them, and moves the policy by one step of the clipped policy
gradient (GRPO, https://arxiv.org/abs/2402.03300 §4.1, without the reference model), on the log-probabilities that came with the tokens.
Then it pushes the new weights into the engine. The reward can be verified: the share of a text's characters that are of one class, lower-
case letters by default. Without a reference model nothing keeps the text sensible, nor the drafts good: that is what is looked at.

Two arms have the same policy. The draft layer of `trained` goes on learning beside it, from the same rollouts, towards the policy's own
distribution; that of `frozen` stays as it was. The same rollouts are computed three times: by each arm with drafts, and without drafts. A
seed's text is the same each time, which is counted, and the tokens per second are compared. The largest difference between the engine's
log-probabilities and the trainer's, before the step changes anything, is noted, too.
"""

from __future__ import annotations

import argparse
import copy
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common.record import save
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file
from torch import Tensor

from mtpserve.config import ModelConfig
from mtpserve.core.sampling import SamplingParams, Speculation
from mtpserve.llm import LLM
from mtpserve.text.outputs import Completion

sys.path.insert(0, str(Path(__file__).parent / "demo_model"))
from export import tensors
from model import DemoModel, L

PROMPTS = (
    "import os\n\n\ndef read_lines(path):\n",
    "class Stack:\n    def __init__(self):\n",
    "def mean(values):\n    ",
    "from collections import defaultdict\n\n",
    "for name in names:\n    ",
    "def test_parser():\n    ",
    "async def fetch(url):\n    ",
    "if __name__ == '__main__':\n    ",
)
ARMS = ("trained", "frozen")
CLIP, DEPTHS, EPSILON = 0.2, 3, 1e-4  # of the ratio; passes of the draft layer that are trained; beside a group's deviation


@dataclass(frozen=True, slots=True)
class Rollout:
    """`ids`: prompt and output."""

    ids: list[int]
    logprobs: list[float]  # of the output's tokens, by the engine
    reward: float

    @property
    def start(self) -> int:
        """Of the output."""
        return len(self.ids) - len(self.logprobs)


def policy_of(folder: Path) -> DemoModel:
    """In float32, as the checkpoint has it."""
    state: dict[str, Tensor] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        state |= load_file(shard)
    policy = DemoModel()
    own = policy.state_dict()
    policy.load_state_dict({name: state[name].to(tensor.dtype) for name, tensor in own.items()})
    return policy


def is_drafting(name: str) -> bool:
    return name.startswith(f"model.layers.{L}.")


def reward_of(text: str, characters: re.Pattern[str]) -> float:
    """The share of its characters that are in the class."""
    return len(characters.findall(text)) / len(text) if text else 0.0


def batch(rollouts: Sequence[Rollout]) -> tuple[Tensor, Tensor, Tensor]:
    """→ ids [B, T], engine's log-probabilities [B, T - 1] of the next tokens, and which of these are the output's [B, T - 1]."""
    longest = max(len(rollout.ids) for rollout in rollouts)
    ids = torch.zeros(len(rollouts), longest, dtype=torch.int64)
    old, output = torch.zeros(len(rollouts), longest - 1), torch.zeros(len(rollouts), longest - 1, dtype=torch.bool)
    for row, rollout in enumerate(rollouts):
        ids[row, : len(rollout.ids)] = torch.tensor(rollout.ids)
        place = slice(rollout.start - 1, len(rollout.ids) - 1)
        old[row, place], output[row, place] = torch.tensor(rollout.logprobs), True
    return ids, old, output


def advantages(rollouts: Sequence[Rollout], size: int) -> Tensor:
    """Of each rollout among those of its prompt, `size` of them [B]."""
    rewards = torch.tensor([rollout.reward for rollout in rollouts]).view(-1, size)
    return ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + EPSILON)).flatten()


class Trainer:
    def __init__(self, policy: DemoModel, rate: float, head_rate: float) -> None:
        self.policy = policy
        named = dict(policy.named_parameters())
        self.trunk = torch.optim.AdamW([p for n, p in named.items() if not is_drafting(n)], lr=rate, weight_decay=0.0)
        self.head = torch.optim.AdamW([p for n, p in named.items() if is_drafting(n)], lr=head_rate, weight_decay=0.0)

    def step(self, rollouts: Sequence[Rollout], size: int) -> float:
        """→ the largest difference of a token's log-probability here and in the engine."""
        ids, old, output = batch(rollouts)
        hidden = self.policy.hidden(ids)
        logits = self.policy.lm_head(hidden[:, :-1])
        new = logits.log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
        ratio, gain = (new - old).exp(), advantages(rollouts, size)[:, None]
        loss = -(torch.minimum(ratio * gain, ratio.clamp(1 - CLIP, 1 + CLIP) * gain) * output).sum() / output.sum()
        self.trunk.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for group in self.trunk.param_groups for p in group["params"]], 1.0)
        self.trunk.step()
        return float((new - old).detach().abs()[output].max())

    def step_head(self, rollouts: Sequence[Rollout]) -> None:
        """The draft layer towards the policy's own distribution on what it has said, several passes deep (demo_model/train.py)."""
        ids, _, output = batch(rollouts)
        with torch.no_grad():
            hidden = self.policy.hidden(ids)
            target = self.policy.lm_head(hidden).softmax(-1)
        rows, loss = ids.shape[1] - DEPTHS, torch.zeros(())
        for depth, out in enumerate(self.policy.draft_hidden(hidden, ids, DEPTHS)):
            place = slice(1 + depth, 1 + depth + rows)
            log_q = self.policy.lm_head(out).log_softmax(-1)
            counts = F.pad(output, (0, 1))[:, place]
            loss = loss - ((target[:, place] * log_q).sum(-1) * counts).sum() / counts.sum()
        self.head.zero_grad()
        loss.backward()
        self.head.step()


def push(llm: LLM, policy: DemoModel, version: int, head: bool) -> None:
    """Bits of the policy's weights, as a checkpoint has them, in float32."""
    state = {name: tensor.detach() for name, tensor in policy.state_dict().items()}
    copies = {name: state[of].clone() for name in tensors(policy) if name not in state for of in [shared(name)]}
    llm.update_weights(
        [(name, tensor) for name, tensor in (state | copies).items() if head or not is_drafting(name)], weight_version=str(version)
    )


def shared(name: str) -> str:
    """The draft layer has copies of embedding and head."""
    return "model.embed_tokens.weight" if name.endswith("embed_tokens.weight") else "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Measured:
    completions: list[Completion]
    tokens_per_s: float
    accept_length: float | None  # it depends on how deep the engine drafts, which adapts
    first_accepted: float | None  # share of drafts right after a committed token: it does not


def measure(llm: LLM, prompts: Sequence[str], params: Sequence[SamplingParams]) -> Measured:
    before = copy.deepcopy(llm.engine.stats)
    start = time.perf_counter()
    completions = llm.generate(list(prompts), list(params))
    seconds = time.perf_counter() - start
    stats = llm.engine.stats
    drafts, accepted = (
        now[0] - then[0]
        for now, then in (
            (stats.draft_tokens_per_position, before.draft_tokens_per_position),
            (stats.accepted_tokens_per_position, before.accepted_tokens_per_position),
        )
    )
    first = accepted / drafts if drafts else None
    return Measured(completions, sum(len(one.tokens) for one in completions) / seconds, stats.accept_length(before), first)


def run(options: argparse.Namespace) -> dict[str, Any]:
    folder = ModelConfig(model="demo").directory
    policy, characters = policy_of(folder), re.compile(options.characters)
    trainer = Trainer(policy, options.rate, options.head_rate)
    engine = {"dtype": "float32", "max_total_tokens": 16384, "max_running_requests": options.running, "device": "cpu"}
    engine |= {"speculative_num_steps": options.drafts, "speculative_adaptive": not options.fixed}
    arms = {arm: LLM("demo", **engine) for arm in ARMS}
    tokenizer = arms["trained"].tokenizer
    prompts = [prompt for prompt in PROMPTS[: options.prompts] for _ in range(options.rollouts)]
    steps: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    began = time.monotonic()
    for step in range(options.steps):
        if time.monotonic() - began > 60 * options.minutes:
            break
        params = SamplingParams(max_tokens=options.tokens, temperature=1.0, logprobs=0, speculation=Speculation(False))
        plain = [replace(params, seed=step * 100_003 + number) for number in range(len(prompts))]
        drafted = [replace(one, speculation=Speculation()) for one in plain]
        sides = [(arm, arms[arm], drafted) for arm in ARMS] + [("plain", arms["frozen"], plain)]
        turn = step % len(sides)  # whoever is first pays for what others leave in the caches
        found = {name: measure(llm, prompts, params) for name, llm, params in sides[turn:] + sides[:turn]}
        rollouts = [
            Rollout(tokenizer.encode(prompt) + one.tokens, [score.logprob for score in one.logprobs or []], reward_of(one.text, characters))
            for prompt, one in zip(prompts, found["trained"].completions, strict=True)
        ]
        difference = trainer.step(rollouts, options.rollouts)
        for _ in range(options.head_steps):
            trainer.step_head(rollouts)
        for arm, llm in arms.items():
            push(llm, policy, step + 1, head=arm == "trained")
        texts = {name: [one.tokens for one in each.completions] for name, each in found.items()}
        for arm in ARMS:
            same = sum(one == other for one, other in zip(texts[arm], texts["plain"], strict=True)) / len(prompts)
            ratio = found[arm].tokens_per_s / found["plain"].tokens_per_s
            shares = {"accept_length": found[arm].accept_length, "first_accepted": found[arm].first_accepted}
            rows.append({"arm": arm, "step": step, **shares, "against_plain": round(ratio, 3), "same_text": same})
        rewards = [rollout.reward for rollout in rollouts]
        steps.append({
            "step": step, "reward": sum(rewards) / len(rewards), "logprob_difference": difference,
            "plain_tokens_per_s": round(found["plain"].tokens_per_s, 1), "seconds": round(time.monotonic() - began, 1),
        })  # fmt: skip
        print(steps[-1], *rows[-2:], flush=True)
    versions = [llm.weight_version for llm in arms.values()]
    for llm in arms.values():
        llm.close()
    return {"steps": steps, "arms": rows, "weight_versions": versions, "options": vars(options)}


def draw(numbers: dict[str, Any], file: str) -> None:
    """Nothing where matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        return
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(10, 3), layout="constrained")
        reward, length, ratio = figure.subplots(1, 3)
        reward.plot([row["step"] for row in numbers["steps"]], [row["reward"] for row in numbers["steps"]], marker="o", markersize=3)
        for arm in ARMS:
            rows = [row for row in numbers["arms"] if row["arm"] == arm]
            for axes, column in ((length, "first_accepted"), (ratio, "against_plain")):
                points = [(row["step"], row[column]) for row in rows if row[column] is not None]
                axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=f"draft layer {arm}")
        ratio.axhline(1.0, color="grey", linewidth=0.8)
        for axes, label in ((reward, "reward"), (length, "share of first drafts accepted"), (ratio, "tokens/s, with drafts over without")):
            axes.set(xlabel="step", ylabel=label)
            axes.grid(alpha=0.3)
        length.legend(fontsize=7, frameon=False)
        figure.savefig(file)


def show(numbers: dict[str, Any]) -> None:
    table = Table("step", "reward", *(f"{what}, {arm}" for what in ("accepted", "tokens/s") for arm in ARMS), "same text")
    for step in numbers["steps"]:
        rows = {row["arm"]: row for row in numbers["arms"] if row["step"] == step["step"]}
        lengths = ["–" if rows[arm]["first_accepted"] is None else f"{rows[arm]['first_accepted']:.2f}" for arm in ARMS]
        ratios = [f"{rows[arm]['against_plain']:.2f} ×" for arm in ARMS]
        same = min(row["same_text"] for row in rows.values())
        table.add_row(str(step["step"]), f"{step['reward']:.3f}", *lengths, *ratios, f"{same:.0%}")
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--minutes", type=float, default=5.5, help="no step begins later")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--rollouts", type=int, default=8, help="of each prompt")
    parser.add_argument("--running", type=int, default=8, help="rollouts at once: drafts pay where they are few")
    parser.add_argument("--tokens", type=int, default=48, help="of each rollout, at most")
    parser.add_argument("--drafts", type=int, default=3)
    parser.add_argument("--fixed", action="store_true", help="draft as deep as that always: a seed's text is then another one")
    parser.add_argument("--rate", type=float, default=2e-4, help="learning rate of the policy")
    parser.add_argument("--head-rate", type=float, default=5e-4, help="and of the draft layer")
    parser.add_argument("--head-steps", type=int, default=2, help="steps of the draft layer for each of the policy")
    parser.add_argument("--characters", default="[a-z]", help="the rewarded class of characters, a regular expression")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dry-run", action="store_true", help="two small steps, to see that it runs")
    parser.add_argument("--json")
    parser.add_argument("--plot", help="an SVG, or a PNG, by its suffix")
    options = parser.parse_args()
    if options.dry_run:
        options.steps, options.prompts, options.rollouts, options.tokens, options.head_steps = 2, 2, 2, 8, 1
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    numbers = run(options)
    show(numbers)
    save(options.json, numbers)
    if options.plot:
        draw(numbers, options.plot)


if __name__ == "__main__":
    main()
