"""Programmatic dependent launch (PDL): a kernel's programs start while the launch before it ends. NVIDIA chips from sm_90 on have it.

A kernel uses it by three lines:

    launch_pdl: tl.constexpr                               its parameter, which Triton also takes as the option of that name
    grid_dependency_wait(launch_pdl)                       in the kernel, after its prologue
    launch_pdl=dependent_launch.enabled(x.device)          in its wrapper

The wait ends when the launch before has completed and its writes can be read. The kernel lets the next launch start after its own wait.
So a prologue reads what any launch but the one just before has written: weights, tables, positions, slots. It writes nothing.
A launch without the option starts when all launches before it have completed. `MTPSERVE_DISABLE_PDL=1` launches every kernel so.
"""

from __future__ import annotations

import os
import re

import torch
import triton
import triton.language as tl

from mtpserve_kernels import tuned

DISABLE = "MTPSERVE_DISABLE_PDL"
FIRST_CHIP = 90  # sm_90


@triton.jit
def grid_dependency_wait(launch_pdl: tl.constexpr):
    """Compiles to nothing where `launch_pdl` is false: older chips, AMD's, and the interpreter have no such instruction."""
    if launch_pdl:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


def enabled(device: torch.device) -> bool:
    """Whether kernels on this device are launched so. Raises ValueError where MTPSERVE_DISABLE_PDL is not 0, 1 or empty."""
    value = os.environ.get(DISABLE, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{DISABLE}={value}: 0 or 1 is accepted")
    if value == "1" or os.environ.get("TRITON_INTERPRET") == "1":
        return False
    chip = re.fullmatch(r"sm_(\d+)", tuned.chip_of(device) or "")
    return chip is not None and int(chip[1]) >= FIRST_CHIP
