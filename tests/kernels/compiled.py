"""What the compiler makes of a launch: the source as `triton.compile` wants it, and facts of the compiled kernel, which are kept.

Compiling what the matrix compiles takes minutes, asking Triton's own cache for it half a minute. Facts are kept in build/matrix by all
that they follow from: a kernel's source and that of what it calls, types, constants, options, the chip, Triton's version, this file.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
THIS_FILE = Path(__file__).read_text()
TARGETS = {"sm_80": ("cuda", 80, 32), "sm_90": ("cuda", 90, 32), "sm_100": ("cuda", 100, 32), "gfx942": ("hip", "gfx942", 64)}
TYPES = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.float8_e4m3fn: "fp8e4nv", torch.int64: "i64",
    torch.int32: "i32", torch.uint8: "u8", torch.bool: "i1", torch.float64: "fp64",
}  # fmt: skip
Launch = tuple[Any, tuple[Any, ...], dict[str, Any]]


@dataclass
class Source:
    """A launch as `triton.compile` wants it: constants, and what is known to be a multiple of 16, as at run time."""

    kernel: Any
    signature: dict[str, str]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], list[list[Any]]]
    options: dict[str, int]

    @classmethod
    def of(cls, launch: Launch) -> Source:
        kernel, args, kwargs = launch
        options = {name: kwargs.pop(name) for name in ("num_warps", "num_stages", "maxnreg") if name in kwargs}
        values = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
        made = cls(kernel, {}, {}, {}, options)
        for i, parameter in enumerate(kernel.params):
            value = values[parameter.name]
            if parameter.is_constexpr or value is None or (isinstance(value, int) and value == 1 and not parameter.do_not_specialize):
                made.signature[parameter.name] = "constexpr"
                made.constants[(i,)] = value
                continue
            made.signature[parameter.name] = (
                f"*{TYPES[value.dtype]}" if isinstance(value, torch.Tensor) else "fp32" if isinstance(value, float) else "i32"
            )
            if isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0 and not parameter.do_not_specialize):
                made.attributes[(i,)] = [["tt.divisibility", 16]]
        return made

    def constant(self, name: str) -> Any:
        """None where the kernel has no such parameter."""
        return next((value for (i,), value in self.constants.items() if self.kernel.arg_names[i] == name), None)

    @property
    def name(self) -> str:
        constants = [(name, self.constants.get((i,))) for i, name in enumerate(self.kernel.arg_names)]
        types = [kind[1:] for kind in self.signature.values() if kind[:3] in ("*fp", "*bf")]
        return f"{self.kernel.__name__}({', '.join([*types, *(f'{name}={value}' for name, value in constants if value is not None)])})"

    @property
    def values(self) -> tuple[tuple[str, str], ...]:
        """What it is one of several variants by."""
        constants = ((self.kernel.arg_names[i], str(value)) for (i,), value in self.constants.items())
        return *self.signature.items(), *((f"{name}=", value) for name, value in constants), *((n, str(v)) for n, v in self.options.items())

    @property
    def tile(self) -> int:
        """The product of its blocks' sizes, of which the names begin with B."""
        blocks = (value for (i,), value in self.constants.items() if self.kernel.arg_names[i][0] == "B" and isinstance(value, int))
        return math.prod(blocks)

    def digest(self, target: str) -> str:
        """`cache_key` is Triton's hash of a kernel's source, of what it calls, and of the globals that these read."""
        import triton

        environment = sorted((name, value) for name, value in os.environ.items() if name.startswith("TRITON_"))
        parts = (
            THIS_FILE, triton.__version__, environment, target, self.kernel.cache_key, self.signature, self.constants,
            self.attributes, self.options,
        )  # fmt: skip
        return hashlib.sha256(repr(parts).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Facts:
    """Of a compiled kernel; where an instruction is asked for that a chip does not have, False."""

    shared: int  # bytes
    spilled: int | None  # registers, or bytes of stack, that did not fit. None: the compiler does not say
    has_tf32: bool
    has_async_copy: bool
    waits_before_stores: bool


def compiled(source: Source, target: str) -> Facts:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kind, arch, warp = TARGETS[target]
    given = ASTSource(source.kernel, source.signature, source.constants, source.attributes)
    kernel = triton.compile(given, target=GPUTarget(kind, arch, warp), options=source.options)
    ptx = kernel.asm.get("ptx", "")
    return Facts(kernel.metadata.shared, spilled(kernel, kind == "hip"), "tf32" in ptx, "cp.async" in ptx, waits_before_stores(ptx))


def spilled(kernel: Any, hip: bool) -> int | None:
    if hip:
        # Scalar registers spill into lanes of vector registers, which costs no memory and is not counted.
        return sum(map(int, re.findall(r"\.(?:vgpr_spill_count|private_segment_fixed_size):\s*(\d+)", kernel.asm["amdgcn"])))
    import triton.backends.nvidia as nvidia

    tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
    if not tool.is_file():
        return None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        said = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True).stdout
    return sum(map(int, re.findall(r"(?:STACK|LOCAL):(\d+)", said)))


def waits_before_stores(ptx: str) -> bool:
    """Whether a kernel that is launched early waits once, lets the next launch start only then, and has written nothing before."""
    places = [ptx.find(text) for text in ("griddepcontrol.wait", "griddepcontrol.launch_dependents", "st.global")]
    return ptx.count("griddepcontrol.wait") == 1 and -1 < places[0] < places[1] < places[2]


class Store:
    """The facts of a group of launches, by digest: those that were saved last."""

    def __init__(self, group: str, folder: Path = ROOT / "build" / "matrix") -> None:
        self.path = folder / f"{group}.json"

    def load(self) -> dict[str, Facts]:
        if not self.path.is_file():
            return {}
        return {digest: Facts(**facts) for digest, facts in json.loads(self.path.read_text()).items()}

    def save(self, facts: Mapping[str, Facts]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        written = self.path.with_suffix(f".{os.getpid()}")
        written.write_text(json.dumps({digest: asdict(fact) for digest, fact in facts.items()}))
        written.replace(self.path)
