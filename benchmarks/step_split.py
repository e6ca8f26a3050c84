"""Where one speculative step's time goes: a dense MiMo-shaped model of 6.4 M parameters with random weights, k = 3, at 1, 32 and 128
requests.

`device` is Runner.launch, the torch part, and `launch_host` what of it is spent outside the step's two device calls (rows, seats and
copies to and from the device); on a CPU a step is done when it is launched. `compute` is the trunk, the draft model and their heads,
and `outside` all of the step but them: attention's plan, acceptance, seats and the host's part. `plan`, `book` and `messages` are the
host's: spans and pages, commit and statistics, and the step's events as the two processes send them; `host` is their sum.

`--against DIR` measures another checkout with the same script, one after the other, `--rounds` times, and prints both and the ratios of
this checkout's medians to the other's. Targets for `host`: 0.15, 0.8 and 2.5 ms; for a step with one request 3 ms.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import torch
from common.record import save
from safetensors.torch import save_file

from mtpserve.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, SpecConfig
from mtpserve.core.request import Request
from mtpserve.core.sampling import SamplingParams
from mtpserve.engine.process.messages import Events, Up
from mtpserve.engine.startup.build import build_engine

Times = dict[str, list[float]]
CLOCKS = {"wall": time.perf_counter, "cpu": time.thread_time}
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


def timed(owner: Any, name: str, times: list[float], clock: Callable[[], float]) -> None:
    """Replace a method by one that notes how long each call takes. One that another checkout does not have is left out."""
    function = getattr(owner, name, None)
    if function is None:
        return

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        start = clock()
        try:
            return function(*args, **kwargs)
        finally:
            times.append(clock() - start)

    setattr(owner, name, wrapped)


def time_models(step: Any, times: list[float], clock: Callable[[], float]) -> None:
    """The calls of the trunk and of the draft model, a step's one after the other."""
    model, drafter = getattr(step, "model", None), getattr(step, "drafter", None)
    passes = getattr(getattr(drafter, "base", drafter), "passes", None)
    for owner, names in ((model, ("trunk", "logits")), (getattr(passes, "model", None), ("extend", "step", "logits"))):
        for name in names:
            timed(owner, name, times, clock)


def made_engine(directory: Path, dtype: str, drafts: int, requests: int, clock: Callable[[], float]) -> tuple[Any, Times, list[float]]:
    fixed = SpecConfig(speculative_algorithm="MTP", speculative_adaptive=False, speculative_num_steps=drafts)
    spec = fixed if drafts else SpecConfig(speculative_algorithm="none")
    cache = CacheConfig(max_total_tokens=max(16384, 1024 * requests))
    scheduler = SchedulerConfig(max_running_requests=requests, chunked_prefill_size=4096)
    engine = build_engine(EngineConfig(model=ModelConfig(model=str(directory), dtype=dtype), cache=cache, spec=spec, scheduler=scheduler))
    runner, parts = engine.runner, {name: list[float]() for name in ("plan", "device", "forward", "propose", "draft", "messages", "step")}
    step = getattr(runner, "step", None)
    timed(engine._scheduler, "plan", parts["plan"], clock)
    timed(runner, "launch", parts["device"], clock)
    timed(step, "forward" if hasattr(step, "forward") else "verify", parts["forward"], clock)  # as older checkouts call it
    timed(step, "propose", parts["propose"], clock)
    timed(getattr(step, "drafter", None), "draft", parts["draft"], clock)
    computing: list[float] = []
    time_models(step, computing, clock)
    parts["compute"] = []
    return engine, parts, computing


def measure(
    directory: Path, dtype: str, drafts: int, temperature: float, requests: int, steps: int, clock: Callable[[], float]
) -> dict[str, float]:
    """Medians in ms over `steps` steps in which all requests decode."""
    engine, parts, computing = made_engine(directory, dtype, drafts, requests, clock)
    encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Up)
    for i in range(requests):
        prompt = [1 + (7 * i + j) % 4000 for j in range(32)]
        engine.add(Request(str(i), prompt, SamplingParams(max_tokens=900, temperature=temperature, seed=i, ignore_eos=True)))
    waiting, settling = {str(i) for i in range(requests)}, 10
    while len(parts["step"]) < steps:
        computing.clear()
        start = clock()
        events = engine.step()
        middle = clock()
        parts["compute"].append(sum(computing))
        decoder.decode(encoder.encode(Events(events, engine.stats)))
        parts["messages"].append(clock() - middle)
        parts["step"].append(middle - start)
        waiting -= {event.id for event in events}
        assert len(events) == requests or waiting or settling, "a request has ended: fewer steps"
        if waiting or settling:
            settling -= not waiting
            for times in parts.values():
                times.clear()
    rows = {name: torch.tensor(times, dtype=torch.float64) for name, times in parts.items() if times}
    rows["book"] = rows["step"] - rows["device"] - rows["plan"]
    rows["host"] = rows["plan"] + rows["book"] + rows["messages"]
    if "forward" in rows and "propose" in rows:
        rows["launch_host"] = rows["device"] - rows["forward"] - rows["propose"]
    rows["whole"] = rows["step"] + rows["messages"]
    rows["outside"] = rows["whole"] - rows["compute"]
    return {name: round(1e3 * float(times.median()), 4) for name, times in rows.items()}


def measured_by(checkout: Path, arguments: list[str]) -> dict[str, dict[str, float]]:
    """This script's numbers of another checkout's code, from a process of its own."""
    paths = os.pathsep.join(map(str, (checkout, checkout / "kernels")))
    with tempfile.NamedTemporaryFile("r", suffix=".json") as out:
        command = [sys.executable, __file__, *arguments, "--json", out.name]
        subprocess.run(command, env=os.environ | {"PYTHONPATH": paths}, cwd=checkout, check=True, stdout=subprocess.DEVNULL)
        return json.load(out)["numbers"]["by_case"]  # type: ignore[no-any-return]


def compare(other: Path, arguments: list[str], rounds: int) -> dict[str, dict[str, Any]]:
    """Medians over the rounds of both, and the ratios of this checkout's to the other's."""
    sides = {"this": Path(__file__).parents[1], "other": other}
    found: dict[str, list[dict[str, dict[str, float]]]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, checkout in sides.items():
            found[name].append(measured_by(checkout, arguments))
    table: dict[str, dict[str, Any]] = {}
    for case in found["this"][0]:
        middle = {name: {part: median(each[case][part] for each in runs) for part in runs[0][case]} for name, runs in found.items()}
        ratio = {part: round(value / middle["other"][part], 3) for part, value in middle["this"].items() if middle["other"].get(part)}
        table[case] = middle | {"ratio": ratio}
        for name, values in table[case].items():
            show(f"{case:24} {name:5}", values)
    return table


def show(name: str, values: dict[str, float]) -> None:
    print(f"{name}: " + "  ".join(f"{part} {value:.3f}" for part, value in values.items()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--drafts", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 32, 128])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: the thread's own time, for a machine that others use too")
    parser.add_argument("--against", type=Path, metavar="DIR", help="another checkout, to compare with")
    parser.add_argument("--rounds", type=int, default=5, help="how often both are measured with --against (default: 5)")
    parser.add_argument("--note", help="what the numbers' readers must know")
    parser.add_argument("--json")
    args = parser.parse_args()
    setting = {"drafts": args.drafts, "temperature": args.temperature, "steps": args.steps, "clock": args.clock}
    noted = {} if args.note is None else {"note": args.note}
    if args.against is not None:
        given = [*("--dtypes", *args.dtypes), *("--requests", *map(str, args.requests))]
        given += [text for name, value in setting.items() for text in (f"--{name}", str(value))]
        save(args.json, setting | noted | {"against": compare(args.against.resolve(), given, args.rounds)})
        return
    numbers: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as directory:
        print(f"{write_checkpoint(Path(directory)) / 1e6:.2f} M parameters; ms")
        for dtype in args.dtypes:
            for requests in args.requests:
                case = f"{dtype}, {requests} requests"
                numbers[case] = measure(Path(directory), dtype, args.drafts, args.temperature, requests, args.steps, CLOCKS[args.clock])
                show(f"{case:24}", numbers[case])
    save(args.json, setting | noted | {"by_case": numbers})


if __name__ == "__main__":
    main()
