"""A byte-level BPE tokenizer of 300 tokens, written as a checkpoint has it."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

BOS, EOS = "<|begin|>", "<|end|>"
BOS_ID, EOS_ID, VOCAB = 0, 1, 300
TEMPLATE = """{{ bos_token }}{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}
{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"""
TEXT = ["def read_lines(path):\n    with open(path) as file:\n        return file.readlines()\n", "Grüße, 世界! 🎉 the end of the line"] * 4


def write(directory: Path, template: str | None = TEMPLATE, **generation: float) -> Path:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=[BOS, EOS], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, BOS_ID)])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": EOS}
    (directory / "tokenizer_config.json").write_text(json.dumps(config | ({"chat_template": template} if template else {})))
    if generation:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return directory
