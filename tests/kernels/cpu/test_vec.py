"""Each vector primitive of each instruction set against torch's: the same bits where IEEE 754 says what they are."""

from __future__ import annotations

import ctypes
import subprocess
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from mtpserve_kernels.cpu import build, library
from torch import Tensor

N = 4096
SPECIAL = [
    0.0,
    -0.0,
    torch.inf,
    -torch.inf,
    torch.nan,
    1e-45,
    -1e-40,
    1.17549435e-38,
    3.4e38,
    1.0,
    -1.0,
    0.5,
    1.5,
    2.5,
    -88.5,
    -104.0,
    88.0,
]


@cache
def compiled(isa: build.InstructionSet) -> ctypes.CDLL:
    with TemporaryDirectory() as directory:
        command = [*build.compiler(isa.machine), *build.FLAGS, *isa.flags, "-I", str(build.SOURCES), "-shared"]
        subprocess.run([*command, str(Path(__file__).with_name("probe.cpp")), "-o", f"{directory}/probe.so"], check=True)
        return ctypes.CDLL(f"{directory}/probe.so")


@pytest.fixture
def probe() -> ctypes.CDLL:
    return compiled(library.library().isa)


def numbers(seed: int, scale: float = 10.0) -> Tensor:
    torch.manual_seed(seed)
    x = torch.randn(N) * scale
    x[: len(SPECIAL) ** 2] = (
        torch.tensor(SPECIAL).repeat(len(SPECIAL)) if seed % 2 else torch.tensor(SPECIAL).repeat_interleave(len(SPECIAL))
    )
    return x


def math(probe: ctypes.CDLL, op: int, *given: Tensor) -> Tensor:
    a, b, c = (*given, *[torch.zeros(N)] * (3 - len(given)))
    out = torch.empty(N)
    probe.probe_math(op, *[ctypes.c_void_p(x.data_ptr()) for x in (a, b, c, out)], ctypes.c_int64(N))
    return out


def same(got: Tensor, expected: Tensor) -> None:
    """Zeros may differ in sign; all NaNs are one."""
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(got.nan_to_num(0, torch.inf, -torch.inf), expected.nan_to_num(0, torch.inf, -torch.inf))


@pytest.mark.parametrize("op", [torch.add, torch.sub, torch.mul, torch.div])
def test_arithmetic(probe: ctypes.CDLL, op: object) -> None:
    a, b = numbers(0), numbers(1)
    index = [torch.add, torch.sub, torch.mul, torch.div].index(op)
    same(math(probe, index, a, b), (torch.add, torch.sub, torch.mul, torch.div)[index](a, b))


def test_max_and_min_keep_a_nan_of_the_second(probe: ctypes.CDLL) -> None:
    a, b = numbers(0), numbers(1)
    number = ~a.isnan()
    for op, exact in ((4, torch.maximum), (5, torch.minimum)):
        same(math(probe, op, a, b)[number], exact(a, b)[number])


def test_fma_rounds_once(probe: ctypes.CDLL) -> None:
    a, b = torch.randn(N), torch.randn(N)
    c = -(a * b)  # all but the rounding error of the product cancels
    same(math(probe, 6, a, b, c), (a.double() * b + c).float())
    assert math(probe, 6, a, b, c).count_nonzero() > N / 2


def test_round_to_even(probe: ctypes.CDLL) -> None:
    x = torch.arange(N) / 4 - N / 8
    same(math(probe, 8, x), x.round())


def test_exp(probe: ctypes.CDLL) -> None:
    x = torch.linspace(-110, 88, N)
    got, expected = math(probe, 9, x), x.double().exp()
    normal = expected > 1.2e-38
    assert ((got - expected).abs() / expected)[normal].max() < 2.5e-7
    assert (got - expected)[~normal].abs().max() < 3e-45  # two of the smallest subnormal numbers
    special = math(probe, 9, numbers(0))[: len(SPECIAL) ** 2].view(len(SPECIAL), -1)[:, 0]
    assert special[3] == 0 and special[4].isnan() and special[0] == special[1] == 1


def test_silu(probe: ctypes.CDLL) -> None:
    x = torch.linspace(-87, 87, N)
    torch.testing.assert_close(math(probe, 10, x), torch.nn.functional.silu(x.double()).float(), rtol=5e-7, atol=0)
    assert math(probe, 10, torch.full((N,), torch.nan)).isnan().all()


def test_scaling_reaches_subnormal_numbers_and_zero(probe: ctypes.CDLL) -> None:
    x, n = torch.rand(N) + 0.7, torch.arange(N).remainder(278).float() - 150
    expected = torch.ldexp(x.double(), n.double()).float()
    got = math(probe, 11, x, n)
    assert torch.equal(got[n > -126], expected[n > -126])
    assert (got - expected).abs().max() < 3e-45


def test_bfloat16_is_rounded_to_even(probe: ctypes.CDLL) -> None:
    bits = torch.randint(-(1 << 31), (1 << 31) - 1, (N,), dtype=torch.int64).to(torch.int32)
    bits[:4] = torch.tensor([0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x00018000])  # two ties, one that becomes infinite, a subnormal number
    x = torch.cat([bits.view(torch.float32)[: N // 2], numbers(0)[: N // 2]])
    vectors, scalars = torch.empty(N, dtype=torch.bfloat16), torch.empty(N, dtype=torch.bfloat16)
    probe.probe_narrow(*[ctypes.c_void_p(t.data_ptr()) for t in (x, vectors, scalars)], ctypes.c_int64(N))
    same(vectors.float(), x.bfloat16().float())
    assert torch.equal(vectors.view(torch.int16), scalars.view(torch.int16))
    wide = torch.empty(N)
    probe.probe_widen(ctypes.c_void_p(vectors.data_ptr()), ctypes.c_void_p(wide.data_ptr()), ctypes.c_int64(N))
    same(wide, vectors.float())


def test_a_part_of_a_vector(probe: ctypes.CDLL) -> None:
    lanes = probe.probe_lanes()
    for count in range(lanes):
        a = torch.full((lanes,), torch.nan)
        a[:count] = torch.randn(count)
        b = a.bfloat16()
        whole, wide, part, narrow = torch.empty(lanes), torch.empty(lanes), torch.full((lanes,), 7.0), torch.full((lanes,), 7.0).bfloat16()
        probe.probe_part(*[ctypes.c_void_p(t.data_ptr()) for t in (a, b, whole, wide, part, narrow)], ctypes.c_int32(count))
        for got, expected, rest in ((whole, a, 0), (wide, b.float(), 0), (part, a, 7), (narrow, b, 7)):
            assert torch.equal(got[:count], expected[:count]) and (got[count:] == rest).all()


def test_sum_and_max_of_a_vector(probe: ctypes.CDLL) -> None:
    lanes = probe.probe_lanes()
    x = torch.randint(-1000, 1000, (N // lanes, lanes)).float()
    x[0] = -torch.inf
    sums, most = torch.empty(len(x)), torch.empty(len(x))
    probe.probe_reduce(*[ctypes.c_void_p(t.data_ptr()) for t in (x, sums, most)], ctypes.c_int64(len(x)))
    assert torch.equal(sums, x.sum(1)) and torch.equal(most, x.amax(1))


def test_pairs_of_bfloat16(probe: ctypes.CDLL) -> None:
    pairs = numbers(0).bfloat16()
    pairs = torch.cat([pairs, pairs.flip(0)])
    for op, which in ((7, 0), (12, 1)):
        same(math(probe, op, pairs.view(torch.float32)), pairs[which::2].float())


def test_comparisons(probe: ctypes.CDLL) -> None:
    lanes = probe.probe_lanes()
    a, b = numbers(0), numbers(1)
    found = torch.empty(3, N // lanes, dtype=torch.int32)
    probe.probe_compare(*[ctypes.c_void_p(t.data_ptr()) for t in (a, b, *found)], ctypes.c_int64(N // lanes))
    expected = torch.stack([a >= b, a.isnan() | b.isnan(), (a >= b) | a.isnan() | b.isnan()])
    assert torch.equal(found, (expected.view(3, -1, lanes).int() << torch.arange(lanes)).sum(2).int())


def test_transpose(probe: ctypes.CDLL) -> None:
    lanes = probe.probe_lanes()
    x, out = torch.randn(lanes, lanes), torch.empty(lanes, lanes)
    probe.probe_transpose(*[ctypes.c_void_p(t.data_ptr()) for t in (x, out)])
    assert torch.equal(out, x.T)
