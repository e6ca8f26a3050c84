"""How long a step should take on a GPU: for each launch the gap before it, and the longest of three times.

    bytes / what the memory gives        operations / what the matrix units give        the chain of waits in one block

The chains were simulated from the instructions of kernels compiled for sm_90, and then corrected by what an H200 took, kernel by kernel
(benchmarks/results/gpu_profile_h200_49d3a13.json).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, prod
from typing import Any

from gpu_kit.launches import KEY_BLOCK, PRODUCT, TRITON, Launch

LIBRARY_SHARE, TRITON_SHARE, SPAN_SHARE = 0.88, 0.85, 0.65  # of the read bandwidth that products, Triton kernels and attention reach
PROGRAMS_PER_US = 1600.0  # that an H200 starts, of one or two warps: measured
MATRIX_SHARE = 0.9  # of the products per second of a large square one


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Stated, where nothing was measured: the bandwidth is that of a copy on an H100, and the gaps are an H200's."""

    read_gb_s: float = 3000.0
    mm_tflops: float = 790.0
    gap_us: float = 0.5
    torch_gap_us: float = 0.85
    processors: int = 132
    source: str = "stated"  # or "measured"

    @property
    def measured_read_gb_s(self) -> float | None:
        return self.read_gb_s if self.source == "measured" else None

    @classmethod
    def of(cls, measurements: dict[str, Any], processors: int = 132) -> Ceilings:
        """Of a result's `ceilings`; the stated ones where it has none."""
        stated = cls()
        return cls(
            read_gb_s=measurements.get("read_gb_s", stated.read_gb_s),
            mm_tflops=measurements.get("mm_tflops", stated.mm_tflops),
            gap_us=measurements.get("empty_us", stated.gap_us),
            torch_gap_us=measurements.get("torch_us", stated.torch_gap_us),
            processors=processors,
            source="measured" if {"read_gb_s", "empty_us"} <= set(measurements) else "stated",
        )


@dataclass(frozen=True, slots=True)
class Step:
    """A prediction; times in milliseconds."""

    launches: int
    num_bytes: float
    body_ms: float
    gap_ms: float

    @property
    def device_ms(self) -> float:
        return self.body_ms + self.gap_ms

    @property
    def record(self) -> dict[str, float]:
        """As a result has it."""
        times = {"body_ms": self.body_ms, "gap_ms": self.gap_ms, "device_ms": self.device_ms}
        return {"launches": self.launches, "bytes": self.num_bytes} | times


def waves(launch: Launch, share: float, ceilings: Ceilings, blocks: int) -> float:
    """Rounds of the grid's blocks, of which `share` have work; `blocks` of them are on one processor at a time."""
    return max(1.0, ceil(share * prod(launch.grid)) / (ceilings.processors * blocks))


def constant(launch: Launch, *names: str, default: int = 1) -> int:
    """The first of these that the launch has."""
    return next((int(launch.constants[name]) for name in names if name in launch.constants), default)


def product_chain(launch: Launch) -> float:
    rows, depth = launch.product[3], launch.product[2]
    return 2.3 + 0.002 * min(depth, 1536) + 0.3 * (rows > 64)  # of a deeper one the library splits the sum


def norm_chain(launch: Launch, context: int, ceilings: Ceilings) -> float:
    return 1.35 + 0.1 * constant(launch, "H") / 1000


CHOICE_US = {32: 1.4, 64: 2.5, 128: 3.4, 256: 12.0}  # of some rows at once among so many experts; half as long again for 16 among 128


def route_chain(launch: Launch, context: int, ceilings: Ceilings) -> float:
    """Scores of a program's splits of the hidden numbers, then the choice for the rows of a block, some at once. Blocks of the first split
    take what an H200 took for one row with 4 splits and with 8."""
    experts, at_once = next((number for number in CHOICE_US if number >= constant(launch, "E")), 256), constant(launch, "CHOICE_ROWS")
    blocks = ceil(constant(launch, "H") / (constant(launch, "BH", default=64) * constant(launch, "SPLITS")))
    choice_us = CHOICE_US[experts] * (1.5 if experts >= 128 and at_once > 8 else 1.0) * ceil(min(launch.rows, 16) / at_once)
    scores_us = 2.7 + 0.8 * blocks + 0.5 * blocks * (constant(launch, "PROGRAM_SPLITS") - 1)
    return scores_us * waves(launch, 1.0, ceilings, 16 // constant(launch, "num_warps", default=4)) + choice_us


def align_chain(launch: Launch, context: int, ceilings: Ceilings) -> float:
    """All choices are read twice, some thousand at a time, by a program for each expert."""
    return 3.4 + 1.2 * ceil(launch.rows * constant(launch, "K") / constant(launch, "CHUNK"))


def gate_up_chain(launch: Launch, context: int, ceilings: Ceilings) -> float:
    return (3.4 + 0.28 * ceil(constant(launch, "H") / constant(launch, "BH", default=64))) * waves(launch, launch.busy_share, ceilings, 3)


def down_chain(launch: Launch, context: int, ceilings: Ceilings) -> float:
    """With the sum of a row's parts by the last program: for one tile of 16 rows, or for four."""
    blocks = ceil(constant(launch, "S") / constant(launch, "BS", default=64))
    return (4.0 + 0.3 * blocks + 1.6 * (constant(launch, "BT") > 16)) * waves(launch, launch.busy_share, ceilings, 4)


def span_chain(launch: Launch, context: int, ceilings: Ceilings) -> float:
    """Blocks of keys one after the other, then the sum of the splits where the last program adds them."""
    width, splits = constant(launch, "BN", default=KEY_BLOCK), launch.grid[2] if len(launch.grid) > 2 else 1
    latent = constant(launch, "D") > constant(launch, "E")
    blocks = ceil(context / width)
    split_blocks = max(ceil(blocks / splits), 1 if latent else 2)
    filled = ceil(blocks / split_blocks)
    kilobytes = width * constant(launch, "D") * (2 if latent else 4) / 1024  # of a block's keys and values, in 16 bits
    block_us = 0.06 * kilobytes * (1.0 if constant(launch, "BM") <= 16 else 1.3)
    sum_us = 0.6 + 0.15 * filled * (1.8 if latent else 1.0) if splits > 1 and "p_arrivals" in launch.shapes else 0.0
    return (3.6 + block_us * split_blocks) * waves(launch, min(1.0, filled / splits), ceilings, 2) + sum_us


def race_chain(launch: Launch, context: int, ceilings: Ceilings) -> float:
    """A chunk's 4,096 logarithms in float64, of which a processor does 64 operations at a time."""
    return 2.5 + 1.7 * prod(launch.grid) / ceilings.processors


def walk_chain(launch: Launch, context: int, ceilings: Ceilings) -> float:
    return 1.6 + 0.15 * constant(launch, "DEPTH", default=0)


def own_product_chain(launch: Launch, context: int, ceilings: Ceilings) -> float:
    """Waits for as many steps of K as are copied ahead, one after the other, then the sum of the parts where there are some."""
    splits = launch.grid[1]
    steps = ceil(ceil(constant(launch, "K") / constant(launch, "BK")) / splits)
    return 1.6 + 0.7 * ceil(steps / max(constant(launch, "STAGES", "num_stages", default=3) - 1, 1)) + (1.0 if splits > 1 else 0.0)


Chain = Callable[[Launch, int, Ceilings], float]


def constant_us(us: float) -> Chain:
    return lambda launch, context, ceilings: us


def rows_us(us: float) -> Chain:
    """Of one program, and the time in which all of them start."""
    return lambda launch, context, ceilings: us + prod(launch.grid) / PROGRAMS_PER_US


CHAINS: dict[str, Chain] = {
    "add_rms_norm_kernel": norm_chain,
    "route_kernel": route_chain,
    "align_kernel": align_chain,
    "gemv_kernel": own_product_chain,
    "skinny_kernel": own_product_chain,
    "gate_up_kernel": gate_up_chain,
    "down_kernel": down_chain,
    "sum_kernel": rows_us(1.2),
    "span_kernel": span_chain,
    "combine_kernel": constant_us(2.7),
    "latent_store_kernel": rows_us(1.8),
    "rope_store_kernel": rows_us(1.45),
    "silu_mul_kernel": rows_us(1.15),
    "argmax_kernel": constant_us(2.3),
    "race_kernel": race_chain,
    "walk_kernel": walk_chain,
}
TRITON_US, TORCH_US = 1.4, 0.9  # of other kernels


def body_us(launch: Launch, context: int, ceilings: Ceilings) -> float:
    """Microseconds in which the launch runs."""
    operations = launch.flops / (MATRIX_SHARE * ceilings.mm_tflops) / 1e6
    if launch.kind == PRODUCT:
        memory_us = launch.num_bytes / (LIBRARY_SHARE * ceilings.read_gb_s) / 1e3 + 1.0
        return max(product_chain(launch), memory_us, operations + 1.5)
    share = SPAN_SHARE if launch.name == "span_kernel" else TRITON_SHARE
    memory_us = launch.num_bytes / (share * ceilings.read_gb_s) / 1e3 + 0.5
    if launch.kind == TRITON:
        return max(CHAINS.get(launch.name, constant_us(TRITON_US))(launch, context, ceilings), memory_us, operations)
    return max(TORCH_US, memory_us)


def prediction_of(launches: list[Launch], context: int, ceilings: Ceilings) -> Step:
    """`context`: keys that a row sees."""
    triton_launches = sum(launch.kind == TRITON for launch in launches)
    gaps = triton_launches * ceilings.gap_us + (len(launches) - triton_launches) * ceilings.torch_gap_us
    body = sum(body_us(launch, context, ceilings) for launch in launches)
    return Step(len(launches), sum(launch.num_bytes for launch in launches), body / 1e3, gaps / 1e3)
