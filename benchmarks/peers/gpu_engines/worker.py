"""One arm in a process of its own, in its engine's interpreter: starts, says `ready`, waits for a line on its input, measures.

Events are JSON lines on the file descriptor --events, `{"ready": Start}` and `{"row": Row}`: its output belongs to the engine. It imports
the standard library and its engine alone. peers/gpu.py starts it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

HERE = Path(__file__).parent
BENCHMARKS = str(HERE.parents[1])
# For these imports alone: transformers looks for a module `kernels`, which benchmarks/ has too.
sys.path = [BENCHMARKS, *(path for path in sys.path if path != str(HERE))]

from peers.gpu_engines.load import Load, Sizes  # noqa: E402
from peers.gpu_engines.record import Arm, Start  # noqa: E402
from peers.gpu_engines.shapes import shape  # noqa: E402

sys.path.remove(BENCHMARKS)

ENGINES = {"vllm": ("vllm_engine", "VllmEngine"), "mtpserve": ("mtpserve_engine", "MtpserveEngine"), "loop": ("torch_loop", "TorchLoop")}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=list(ENGINES))
    parser.add_argument("model")
    parser.add_argument("drafts", type=int)
    parser.add_argument("--batches", type=int, nargs="+", required=True)
    for name in ("prompt", "output", "repeats", "warm", "timed", "kv-bytes", "events"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--options", type=json.loads, default={}, help="JSON: more arguments of the engine")
    parser.add_argument("--toy", action="store_true")
    return parser.parse_args()


def main() -> None:
    args, start_time = arguments(), time.perf_counter()
    config, arm = shape(args.model, args.toy), Arm(args.engine, args.model, args.drafts)
    sizes = Sizes(tuple(args.batches), args.prompt, args.output, args.repeats, args.warm, args.timed)
    module, name = ENGINES[args.engine]
    engine_class = getattr(import_module(f"peers.gpu_engines.{module}"), name)
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / args.model
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
        engine = engine_class(directory, args.drafts, sizes, args.kv_bytes, args.options)
    load = Load(engine, config, sizes, args.drafts)
    load.throughput(1, min(8, args.output), seed=0)
    start = Start(arm.engine, arm.model, arm.drafts, time.perf_counter() - start_time, engine.settings())
    with open(args.events, "w", buffering=1, encoding="utf-8") as events:
        events.write(json.dumps({"ready": asdict(start)}) + "\n")
        if not sys.stdin.readline():  # the parent has ended
            return
        events.writelines(json.dumps({"row": asdict(row)}) + "\n" for row in load.rows(arm))
        events.write(json.dumps({"done": True}) + "\n")
    os._exit(0)  # engines' tidying up takes seconds


if __name__ == "__main__":
    main()
