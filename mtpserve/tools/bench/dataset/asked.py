"""What a run asks: conversations of one turn or several, and what the options say about them."""

from __future__ import annotations

from dataclasses import dataclass

Prompt = str | tuple[int, ...]  # text, or token ids


@dataclass(frozen=True, slots=True)
class AskedTurn:
    prompt: Prompt  # what this turn adds to the conversation
    output: int | None = None  # most tokens of the answer; None: the server decides
    # that the prompt was meant to have, by the tokenizer at hand; None: nobody has counted
    tokens: int | None = None


@dataclass(frozen=True, slots=True)
class AskedConversation:
    turns: tuple[AskedTurn, ...]
    category: str = ""


@dataclass(frozen=True, slots=True)
class Questions:
    """`warm` is sent first and not measured. `notes` say how all this was made. `fresh`: no prompt begins
    like another."""

    measured: tuple[AskedConversation, ...]
    warm: tuple[AskedConversation, ...] = ()
    notes: tuple[str, ...] = ()
    fresh: bool = False

    @property
    def requests(self) -> int:
        return sum(len(conversation.turns) for conversation in self.measured)


@dataclass(frozen=True, slots=True)
class DatasetOptions:
    """All lengths are in tokens. Names of fields are those of the options."""

    dataset_name: str = "random"
    dataset_path: str | None = None
    num_prompts: int = 1000
    warm: int = 1
    seed: int = 0
    random_input_len: int = 1024
    random_output_len: int = 128
    random_prefix_len: int = 0
    random_range_ratio: float | None = None  # None: all of one length
    # the ratio as SGLang means it: lengths in [ratio × n, n]; otherwise vLLM's: [(1 - ratio) × n, (1 + ratio)
    # × n]
    shrinks: bool = False
    sharegpt_output_len: int | None = None
    sharegpt_context_len: int | None = None
    custom_output_len: int | None = None  # None: the file's, where it has any
    spec_bench_output_len: int = 256
    spec_bench_category: str | None = None
    gsp_num_groups: int = 64
    gsp_prompts_per_group: int = 16
    gsp_system_prompt_len: int = 2048
    gsp_question_len: int = 128
    gsp_output_len: int = 256
    multi_turn_num_turns: int = 3
    chat: bool = False
