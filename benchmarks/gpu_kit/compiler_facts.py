"""What the compiler makes of a step's kernels for sm_90: registers, spills, shared memory. Nothing is run, and no GPU is needed.

It needs the tests of the kernels beside the benchmarks, and cuobjdump, which comes with Triton.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from gpu_kit.launch_counter import launches_of
from gpu_kit.models import Cell, DeviceConfig

TARGET = ("cuda", 90, 32)


def usage(cubin: bytes) -> dict[str, int]:
    """Registers of a thread and bytes of its stack, which is what spilled."""
    import triton.backends.nvidia as nvidia

    tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage_text = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack = (sum(map(int, re.findall(rf"{name}:(\d+)", usage_text))) for name in ("REG", "STACK"))
    return {"registers": registers, "stack_bytes": stack}


def facts(device_config: DeviceConfig, cell: Cell) -> list[dict[str, Any]]:
    """A record for each kernel of the cell's step that differs from the others in its source, types or constants."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from tests.kernels.matrix import Source

    sources: dict[str, Source] = {}

    def observe(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        source = Source.of((kernel, args, kwargs))
        sources.setdefault(f"{source.name} {source.signature} {source.options}", source)

    launches_of(device_config, cell, observe)
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # the default, said without a warning
    records = []
    for source in sources.values():
        code = ASTSource(source.kernel, source.signature, source.constants, source.attributes)
        kernel = triton.compile(code, target=GPUTarget(*TARGET), options=source.options)
        warps = source.options.get("num_warps", 4)
        shared = int(kernel.metadata.shared)
        records.append({"kernel": source.name, "warps": warps, **usage(kernel.asm["cubin"]), "shared_bytes": shared})
    return records
