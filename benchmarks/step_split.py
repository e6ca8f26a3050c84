"""The parts of one speculative step's time: a dense MiMo-shaped model of 6.4 M parameters with random weights, batch 1, k = 3.

`device` is Runner.step, the torch part; `plan`, `book` and `messages` are on the host: spans and pages, commit and statistics, and
the step's events as the two processes send them. Targets: 3 ms for a step, 0.5 ms of it on the host.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import torch
from common.record import save
from safetensors.torch import save_file

from mtpserve.config import CacheConfig, EngineConfig, ModelConfig, SpecConfig
from mtpserve.core.request import Request
from mtpserve.core.sampling import SamplingParams
from mtpserve.engine.build import build_engine
from mtpserve.engine.messages import Events, Up

HIDDEN, LAYERS, HEADS, KV_HEADS, DIM, INNER, VOCAB = 256, 4, 4, 2, 64, 800, 4096


def layer_tensors(prefix: str) -> dict[str, torch.Tensor]:
    shapes = {
        "input_layernorm.weight": (HIDDEN,),
        "post_attention_layernorm.weight": (HIDDEN,),
        "self_attn.o_proj.weight": (HIDDEN, HEADS * DIM),
        "mlp.gate_proj.weight": (INNER, HIDDEN),
        "mlp.up_proj.weight": (INNER, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, INNER),
    }
    for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
        shapes[f"self_attn.{name}_proj.weight"] = (heads * DIM, HIDDEN)
        shapes[f"self_attn.{name}_proj.bias"] = (heads * DIM,)
    return {prefix + name: torch.randn(shape) * 0.05 for name, shape in shapes.items()}


def write_checkpoint(directory: Path) -> int:
    """→ its number of parameters."""
    tensors = {"model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN), "lm_head.weight": torch.randn(VOCAB, HIDDEN) * 0.05}
    for i in range(LAYERS):
        tensors |= layer_tensors(f"model.layers.{i}.")
    tensors |= layer_tensors("model.mtp_layers.0.")
    for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        tensors[f"model.mtp_layers.0.{name}.weight"] = torch.ones(HIDDEN)
    tensors["model.mtp_layers.0.input_proj.weight"] = torch.randn(HIDDEN, 2 * HIDDEN) * 0.05
    tensors["model.norm.weight"] = torch.ones(HIDDEN)
    save_file({name: t.to(torch.bfloat16) for name, t in tensors.items()}, directory / "model.safetensors")
    config = {
        "architectures": ["MiMoForCausalLM"], "model_type": "mimo", "num_hidden_layers": LAYERS, "num_nextn_predict_layers": 1,
        "hidden_size": HIDDEN, "intermediate_size": INNER, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
        "head_dim": DIM, "vocab_size": VOCAB, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 640000,
        "torch_dtype": "bfloat16", "tie_word_embeddings": False, "attention_bias": True, "eos_token_id": 0,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    return sum(t.numel() for t in tensors.values())


def timed(owner: Any, name: str, times: list[float]) -> None:
    """Replaces a method by one that records the duration of each call."""
    function = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            times.append(time.perf_counter() - start)

    setattr(owner, name, wrapped)


def measure(directory: Path, dtype: str, drafts: int, temperature: float, steps: int) -> dict[str, float]:
    """Medians in ms over `steps` steady steps."""
    spec = SpecConfig(speculative_algorithm="MTP", speculative_num_steps=drafts) if drafts else SpecConfig()
    model = ModelConfig(model=str(directory), dtype=dtype)
    engine = build_engine(EngineConfig(model=model, cache=CacheConfig(max_total_tokens=16384), spec=spec))
    runner, parts = engine._runner, {name: list[float]() for name in ("plan", "device", "trunk", "draft", "messages", "step")}
    timed(engine._scheduler, "plan", parts["plan"])
    timed(runner, "launch", parts["device"])  # on a CPU a step is done when it is launched
    timed(runner.step.model, "trunk", parts["trunk"])  # type: ignore[attr-defined]
    timed(runner.drafter, "draft", parts["draft"])  # type: ignore[attr-defined]
    encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Up)
    engine.add(Request("0", list(range(1, 33)), SamplingParams(max_tokens=3000, temperature=temperature, seed=0, ignore_eos=True)))
    while engine.has_work and len(parts["step"]) < steps + 20:
        start = time.perf_counter()
        events = engine.step()
        middle = time.perf_counter()
        decoder.decode(encoder.encode(Events(events, engine.stats)))
        parts["messages"].append(time.perf_counter() - middle)
        parts["step"].append(middle - start)
    medians = {name: 1e3 * median(times[20:]) for name, times in parts.items()}
    medians["book"] = medians["step"] - medians["device"] - medians["plan"]
    medians["host"] = medians["plan"] + medians["book"] + medians["messages"]
    medians["whole"] = medians["step"] + medians["messages"]
    return {name: round(value, 3) for name, value in medians.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--drafts", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--json")
    args = parser.parse_args()
    numbers: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        print(f"{write_checkpoint(Path(directory)) / 1e6:.2f} M parameters")
        for dtype in args.dtypes:
            numbers[dtype] = medians = measure(Path(directory), dtype, args.drafts, args.temperature, args.steps)
            print(f"{dtype}: " + "  ".join(f"{name} {value:.3f}" for name, value in medians.items()) + "  (ms)")
    save(args.json, {"drafts": args.drafts, "temperature": args.temperature, "by_dtype": numbers})


if __name__ == "__main__":
    main()
