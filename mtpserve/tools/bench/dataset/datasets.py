"""The datasets by name, and those that are made up: of texts or token ids of given lengths. Datasets from
files are in files.py.

The same seed makes the same questions. Warm-up questions are others than the measured ones, so that no prefix
cache knows them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random

from mtpserve.config.options import check
from mtpserve.core.errors import ConfigError
from mtpserve.tools.bench.dataset.asked import (
    AskedConversation,
    AskedTurn,
    DatasetOptions,
    Questions,
)
from mtpserve.tools.bench.dataset.files import (
    custom,
    shared_conversations,
    shared_prompts,
    shared_texts,
    spec_bench,
)
from mtpserve.tools.bench.dataset.texts import TextMaker
from mtpserve.tools.bench.dataset.tokenizing import BenchTokenizer

FIRST_ID = 3  # lower ids are special tokens in most vocabularies


@dataclass(frozen=True, slots=True)
class DatasetSource:
    """What a dataset may use. `vocabulary`: ids below it may be asked, for prompts of ids."""

    options: DatasetOptions
    random: Random
    tokenizer: BenchTokenizer | None
    vocabulary: int

    def texts(self) -> TextMaker:
        name = self.options.dataset_name
        if self.tokenizer is None:
            raise ConfigError(
                f"--dataset-name {name} needs the model's tokenizer: --tokenizer DIR; or take "
                f"--dataset-name random-ids"
            )
        return TextMaker(self.tokenizer, self.random, chat=self.options.chat)

    def lengths(self, mean: int) -> Callable[[], int]:
        low, high = self.range(mean)
        return lambda: self.random.randint(low, high)

    def range(self, mean: int) -> tuple[int, int]:
        ratio = self.options.random_range_ratio
        if ratio is None:
            return mean, mean
        if self.options.shrinks:
            return max(1, int(mean * ratio)), mean
        return max(1, int(mean * (1 - ratio))), int(mean * (1 + ratio))

    def described(self, input_len: int, output_len: int) -> str:
        (a, b), (c, d) = self.range(input_len), self.range(output_len)
        return f"prompts of {span(a, b)} tokens, answers of {span(c, d)}"


def span(low: int, high: int) -> str:
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def split(
    conversations: Sequence[AskedConversation], source: DatasetSource, *notes: str, fresh: bool = False
) -> Questions:
    """The first are measured, and what is left over warms up. Where there are too few for both, the first
    warm up too."""
    measured = tuple(conversations[: source.options.num_prompts])
    if not measured:
        raise ConfigError(f"--dataset-path {source.options.dataset_path}: nothing in it can be asked")
    if len(measured) < source.options.num_prompts:
        notes = (
            *notes,
            f"the dataset has {len(measured):,} of the {source.options.num_prompts:,} conversations "
            f"that --num-prompts asks for",
        )
    warm = [*conversations[len(measured) :], *measured][: source.options.warm]
    if len(warm) > len(conversations) - len(measured):
        notes = (
            *notes,
            "the dataset has no more: the warm-up asks some of what is measured, and a prefix cache "
            "knows it (--flush-cache)",
        )
    return Questions(measured, tuple(warm), notes, fresh)


def random_texts(source: DatasetSource) -> Questions:
    options, maker = source.options, source.texts()
    texts = shared_texts(options.dataset_path, source.random) if options.dataset_path is not None else []
    lengths, answers = source.lengths(options.random_input_len), source.lengths(options.random_output_len)
    prefix = (
        maker.exactly(options.random_prefix_len, part_of_prompt=True)[0] if options.random_prefix_len else ""
    )
    conversations = []
    for i in range(options.num_prompts + options.warm):
        num_tokens = options.random_prefix_len + lengths()
        text, count = maker.exactly(num_tokens, prefix, texts[i % len(texts)] if texts else None)
        conversations.append(AskedConversation((AskedTurn(text, answers(), count),)))
    notes = [f"random {'parts of ' + str(options.dataset_path) if texts else 'words'}: "
             f"{source.described(options.random_input_len, options.random_output_len)}"]  # fmt: skip
    if prefix:
        notes.append(f"all prompts begin with the same {options.random_prefix_len:,} tokens")
    return split(conversations, source, *notes, fresh=not (prefix or texts))


def random_ids(source: DatasetSource) -> Questions:
    options = source.options
    if options.chat:
        raise ConfigError(
            "--dataset-name random-ids asks with token ids, which chat completions do not take: use "
            "a completions --backend"
        )
    lengths, answers = source.lengths(options.random_input_len), source.lengths(options.random_output_len)
    low = min(FIRST_ID, source.vocabulary - 1)

    def ids(length: int) -> tuple[int, ...]:
        return tuple(source.random.choices(range(low, source.vocabulary), k=length))

    prefix = ids(options.random_prefix_len)
    prompts = [prefix + ids(lengths()) for _ in range(options.num_prompts + options.warm)]
    conversations = [AskedConversation((AskedTurn(prompt, answers(), len(prompt)),)) for prompt in prompts]
    described = source.described(options.random_input_len, options.random_output_len)
    return split(
        conversations, source, f"random token ids below {source.vocabulary:,}: {described}", fresh=not prefix
    )


def shared_prefix(source: DatasetSource) -> Questions:
    """Groups of prompts; those of one group begin with the same system prompt. In random order, as in
    SGLang's client."""
    options, maker = source.options, source.texts()
    length = options.gsp_system_prompt_len + options.gsp_question_len
    conversations = []
    for _ in range(options.gsp_num_groups):
        system = maker.exactly(options.gsp_system_prompt_len)[0] + "\n\n"
        questions = [maker.exactly(length, system) for _ in range(options.gsp_prompts_per_group)]
        conversations += [
            AskedConversation((AskedTurn(text, options.gsp_output_len, count),)) for text, count in questions
        ]
    source.random.shuffle(conversations)
    warm = maker.exactly(length)[0]
    note = (f"{options.gsp_num_groups:,} groups of {options.gsp_prompts_per_group:,} prompts of {length:,} "
f"tokens, of which each group "
            f"shares {options.gsp_system_prompt_len:,}; answers of {options.gsp_output_len:,}")  # fmt: skip
    return Questions(
        tuple(conversations),
        (AskedConversation((AskedTurn(warm, options.gsp_output_len),)),) * options.warm,
        (note,),
    )


def multi_turn(source: DatasetSource) -> Questions:
    """Returns conversations in which each turn's prompt contains those before it and the server's own
    answers."""
    options = source.options
    if options.dataset_path is not None:
        count = None if source.tokenizer is None else source.tokenizer.encode
        shared = shared_conversations(options, source.random, count)
        return split(shared, source, f"conversations of {options.dataset_path} with the server's own answers")
    maker = source.texts()
    lengths, answers = source.lengths(options.random_input_len), source.lengths(options.random_output_len)

    def turn(number: int) -> AskedTurn:
        text, count = maker.exactly(lengths(), "\n" if number else "", part_of_prompt=number > 0)
        return AskedTurn(text, answers(), count if number == 0 else None)

    conversations = [
        AskedConversation(tuple(turn(number) for number in range(options.multi_turn_num_turns)))
        for _ in range(options.num_prompts + options.warm)
    ]
    described = source.described(options.random_input_len, options.random_output_len)
    return split(
        conversations,
        source,
        f"conversations of {options.multi_turn_num_turns} turns, each adding {described}",
    )


def from_file(reader: Callable[..., list[AskedConversation]], source: DatasetSource) -> Questions:
    if source.options.dataset_path is None:
        raise ConfigError(f"--dataset-name {source.options.dataset_name} needs --dataset-path FILE")
    count = None if source.tokenizer is None else source.tokenizer.encode
    notes = (
        []
        if count is not None or reader is custom
        else ["no tokenizer: in the dataset's texts four characters are one token"]
    )
    conversations = reader(source.options, source.random, count)
    return split(
        conversations,
        source,
        f"{len(conversations):,} conversations in {source.options.dataset_path}",
        *notes,
    )


DATASETS: dict[str, Callable[[DatasetSource], Questions]] = {
    "random": random_texts,
    "random-ids": random_ids,
    "sharegpt": partial(from_file, shared_prompts),
    "custom": partial(from_file, custom),
    "spec-bench": partial(from_file, spec_bench),
    "generated-shared-prefix": shared_prefix,
    "multi-turn": multi_turn,
}
ALSO = {"spec_bench": "spec-bench", "gsp": "generated-shared-prefix"}  # other names of these


def questions_of(options: DatasetOptions, tokenizer: BenchTokenizer | None, vocabulary: int) -> Questions:
    """Raises ConfigError naming the option, or the file and line."""
    name = ALSO.get(options.dataset_name, options.dataset_name)
    check(name in DATASETS, "dataset_name", options.dataset_name, f"one of {', '.join(DATASETS)}")
    ratio = options.random_range_ratio
    highest = (
        "in [0, 1]"
        if options.shrinks
        else "in [0, 1), as vLLM means it: lengths from (1 - ratio) to (1 + ratio) times the given one"
    )
    check(
        ratio is None or 0 <= ratio < 1 or (options.shrinks and ratio == 1),
        "random_range_ratio",
        ratio,
        highest,
    )
    return DATASETS[name](DatasetSource(options, Random(options.seed), tokenizer, vocabulary))
