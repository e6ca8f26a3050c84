"""How long a step takes on a GPU, predicted without one: its launches are counted, with their bytes, and added up (gpu_kit/predict.py).

python benchmarks/gpu_model.py                          stated ceilings of an H100; every figure is a prediction
python benchmarks/gpu_model.py --against FILE.json      the ceilings and the steps that gpu_profile.py has measured, beside predictions
python benchmarks/gpu_model.py --models 475m --compile  and what the compiler makes of the kernels for sm_90, which takes minutes
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # before triton is imported: what would be compiled is counted

from common.shapes import SHAPES, StepBytes
from gpu_kit.launch_counter import CPU, launches_of
from gpu_kit.models import PROMPT_ROWS, Cell, DeviceConfig, cells_of
from gpu_kit.predict import Ceilings, prediction_of
from gpu_kit.tables import column_lines, missed_predictions, predictions

FAKE_DEVICE = DeviceConfig(CPU, toy=False)


def cell_of(record: dict[str, Any]) -> Cell:
    """Of a record of `steps`. A prompt's context is that of its rows, which follow from the graph's size."""
    return Cell(record["model"], record["drafts"], record["requests"], 0 if record["prompt"] else record["context"], record["prompt"])


def record_of(cell: Cell, ceilings: Ceilings, measurement: dict[str, Any] | None = None) -> dict[str, Any]:
    """A record like those of `steps`, with a prediction."""
    launches = launches_of(FAKE_DEVICE, cell)
    context = cell.context if measurement is None else measurement["context"]
    step = prediction_of(launches, context or PROMPT_ROWS // cell.requests, ceilings)
    least = None if cell.prompt else StepBytes(SHAPES[cell.model]).step(cell.requests, cell.context, cell.drafts)
    bare = {
        "model": cell.model, "drafts": cell.drafts, "requests": cell.requests, "context": cell.context, "prompt": cell.prompt,
        "floor_ms": None if least is None else least / ceilings.read_gb_s / 1e6,
    }  # fmt: skip
    return (measurement or bare) | {"prediction": step.record}


def compiler_rows(models: list[str], requests: int, context: int) -> list[list[str]]:
    from gpu_kit.compiler_facts import facts

    keys = "warps", "registers", "stack_bytes", "shared_bytes"
    rows = [["kernel", "warps", "registers", "spilled bytes", "shared bytes"]]
    for model in models:
        for fact in facts(FAKE_DEVICE, Cell(model, 3, requests, context)):
            rows += [[f"{model} {fact['kernel'][:80]}", *(str(fact[key]) for key in keys)]]
    return rows


def numbers_of(file: str, parser: argparse.ArgumentParser) -> dict[str, Any]:
    try:
        return dict(json.loads(Path(file).read_text())["numbers"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        parser.error(f"--against must be a result of gpu_profile.py, got {file}: {type(error).__name__}: {error}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), default=["475m", "0.5b", "7b", "v2-lite", "30b-a3b"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 64, 128])
    parser.add_argument("--contexts", nargs=2, type=int, default=[256, 2048], metavar=("SHORT", "LONG"))
    parser.add_argument("--against", metavar="FILE", help="a result of gpu_profile.py: its ceilings and steps")
    parser.add_argument(
        "--compile", action="store_true", help="registers, spills and shared memory of the kernels of one step of each model"
    )
    parser.add_argument("--json", metavar="FILE", help="where to write the predictions")
    options = parser.parse_args()
    result = {} if options.against is None else numbers_of(options.against, parser)
    ceilings = Ceilings.of(result.get("ceilings", {}), result.get("env", {}).get("processors", 132))
    rates = f"read {ceilings.read_gb_s:.0f} GB/s, products {ceilings.mm_tflops:.0f} TFLOP/s, gap {ceilings.gap_us:.2f} us"
    print(f"{ceilings.source} ceilings: {rates}")
    steps = [record for record in result.get("steps", []) if record["model"] in options.models]
    cells = [(cell_of(record), record) for record in steps]
    if not cells:
        cells = [(cell, None) for cell in cells_of(options.models, options.batches, tuple(options.contexts))]
    records = [record_of(cell, ceilings, record) for cell, record in cells]
    print("\n".join([*predictions(records), *missed_predictions(records)]))
    if options.compile:
        print("\n".join(column_lines(compiler_rows(options.models, options.batches[0], options.contexts[0]))))
    if options.json is not None:
        Path(options.json).write_text(json.dumps({"ceilings": ceilings.source, "steps": records}, indent=1) + "\n")


if __name__ == "__main__":
    main()
