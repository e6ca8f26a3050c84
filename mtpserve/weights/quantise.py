"""Converts a checkpoint to DeepSeek-V3's format: the layers' matrices in float8 (e4m3) with a float32 scale
per 128 x 128 block.

    python -m mtpserve.weights.quantise mtpserve/demo OUT [--keep-mtp]

Embedding, head, norms, routers and the fusion of an MTP layer's inputs are copied unchanged. There is no
calibration.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from mtpserve.core.errors import ConfigError, LoadError, MTPServeError
from mtpserve.core.gguf import SUFFIX
from mtpserve.quant.fp8 import BLOCK, SCALE, quantize_block
from mtpserve.weights.checkpoint.checkpoint import INDEX, Checkpoint
from mtpserve.weights.checkpoint.hf import read_config
from mtpserve.weights.checkpoint.layouts import with_mtp_layers

# The matrices that are published in float8. The weights of an indexer's heads are not.
MATRIX = re.compile(
    r".*\.(self_attn|mlp)\.(?!indexer\.weights_proj)(.*_proj(_with_mqa)?|indexer\.(wq_b|wk))\.weight"
)
FLOATS = ("BF16", "F16", "F32")
CONFIG = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": list(BLOCK),
}


def quantise(source: Path, out: Path, keep_mtp: bool = False) -> int:
    """→ the number of converted matrices. `keep_mtp` leaves the MTP layers unchanged. Raises LoadError, and
    ConfigError where `out` exists."""
    if out.exists():
        raise ConfigError(f"{out}: is there already; name a directory that is not, nothing is written over")
    if source.suffix == SUFFIX:
        raise LoadError(f"{source}: is a GGUF file; float8 is made of a directory with safetensors files")
    checkpoint, config = Checkpoint.open(source), read_config(source)
    checkpoint, layout = with_mtp_layers(checkpoint, config.get_int("num_hidden_layers", at_least=1))
    unchanged = layout.prefixes if keep_mtp and layout else ()
    out.mkdir(parents=True)
    weight_map: dict[str, str] = {}
    total = converted = 0
    for file in sorted({entry.file for entry in checkpoint.tensors.values()}):
        written: dict[str, Tensor] = {}
        for name in (name for name, entry in checkpoint.tensors.items() if entry.file == file):
            tensor = checkpoint.tensor(name)
            if (
                MATRIX.fullmatch(name)
                and checkpoint.tensors[name].dtype in FLOATS
                and not (unchanged and name.startswith(unchanged))
            ):
                tensor, written[name + SCALE] = quantize_block(tensor)
                converted += 1
            written[name] = tensor.contiguous()
        save_file(written, out / file.name, metadata={"format": "pt"})
        checkpoint.close()
        weight_map |= dict.fromkeys(written, file.name)
        total += sum(tensor.nbytes for tensor in written.values())
    for other in source.iterdir():
        if other.is_file() and other.suffix != ".safetensors":
            shutil.copy(other, out)
    values = json.loads((source / "config.json").read_text()) | {"quantization_config": CONFIG}
    (out / "config.json").write_text(json.dumps(values, indent=2) + "\n")
    (out / INDEX).write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2) + "\n"
    )
    return converted


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path, help="a directory that does not exist yet")
    parser.add_argument("--keep-mtp", action="store_true", help="leave the MTP layers in the type they have")
    args = parser.parse_args()
    try:
        print(f"{args.out}: {quantise(args.source, args.out, args.keep_mtp)} matrices in float8")
    except MTPServeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
