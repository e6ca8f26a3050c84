"""Small kernels against their references: odd sizes, strided input, outputs of which every number must have been written."""

from __future__ import annotations

import pytest
import torch
from mtpserve_kernels import tuned
from mtpserve_kernels.fused import reference
from mtpserve_kernels.fused.linear import skinny_linear
from mtpserve_kernels.fused.norm import add_rms_norm
from mtpserve_kernels.fused.rope import latent_store, rope_store
from mtpserve_kernels.fused.silu import silu_mul
from torch import Tensor

from mtpserve.layers.devices import triton_kernels


def numbers(device: torch.device, *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(device, dtype)


def same(actual: Tensor, expected: Tensor) -> None:
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}[expected.dtype]
    torch.testing.assert_close(actual.float(), expected.float(), atol=tolerance, rtol=tolerance)


TYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("rows", "size"), [(1, 7), (3, 256), (5, 1000), (2, 4096), (0, 64)])
def test_add_rms_norm(device: torch.device, rows: int, size: int, dtype: torch.dtype) -> None:
    wide = numbers(device, rows, size + 3, dtype=dtype)
    x, weight = wide[:, :size], numbers(device, size, dtype=dtype)
    for residual in (None, numbers(device, rows, size, dtype=dtype, seed=5)):
        for actual, expected in zip(
            add_rms_norm(x, residual, weight, 1e-6), reference.add_rms_norm(x, residual, weight, 1e-6), strict=True
        ):
            same(actual, expected)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("rows", "size"), [(1, 96), (4, 1), (3, 1025), (0, 8)])
def test_silu_mul(device: torch.device, rows: int, size: int, dtype: torch.dtype) -> None:
    x = numbers(device, rows, 2 * size + 5, dtype=dtype)[:, : 2 * size] * 4
    same(silu_mul(x), reference.silu_mul(x))


def tables(device: torch.device, rope: int, positions: int = 50) -> tuple[Tensor, Tensor]:
    angles = torch.outer(torch.arange(positions).float(), 10000.0 ** -(torch.arange(0, rope, 2).float() / rope)).to(device)
    return angles.cos(), angles.sin()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rope"),
    [(4, 2, 64, 64), (3, 1, 80, 32), (10, 9, 128, 128), (1, 1, 96, 96), (2, 1, 24, 0), (9, 1, 68, 2)],
)
def test_rope_store(device: torch.device, heads: int, kv_heads: int, dim: int, rope: int, norm: bool, interleaved: bool) -> None:
    rows, (cos, sin) = 5, tables(device, rope)
    qkv = numbers(device, rows, (heads + 2 * kv_heads) * dim + 8)[:, : (heads + 2 * kv_heads) * dim].unflatten(1, (-1, dim))
    positions, slots = torch.tensor([0, 49, 7, 7, 3], device=device), torch.tensor([9, 2, 0, 31, 5], device=device)
    norms = (numbers(device, dim), numbers(device, dim, seed=1)) if norm else (None, None)
    for dtype in (torch.float32, torch.float8_e4m3fn):
        caches = [[torch.full((32, kv_heads, dim), torch.nan, device=device).to(dtype) for _ in range(2)] for _ in range(2)]
        both = [
            kernel(qkv, positions, cos, sin, slots, *mine, heads, *norms, 1e-5, interleaved)
            for kernel, mine in zip((rope_store, reference.rope_store), caches, strict=True)
        ]
        same(*both)
        for actual, expected in zip(*caches, strict=True):
            if dtype == torch.float32:
                same(actual[slots], expected[slots])
            else:  # the interpreter loses the carry where a mantissa rounds up to the next power of two
                assert (actual[slots].float() != expected[slots].float()).float().mean() <= (0.01 if device.type == "cuda" else 0.1)
            assert actual.float().isnan().all((1, 2)).sum() == 32 - rows, "no other slot is touched"


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("heads", "rank", "rope", "nope"), [(2, 512, 64, 128), (5, 96, 32, 16), (18, 100, 48, 8)])
def test_latent_store(device: torch.device, heads: int, rank: int, rope: int, nope: int, interleaved: bool) -> None:
    rows, (cos, sin) = 4, tables(device, rope)
    q, down = numbers(device, rows, heads, nope + rope), numbers(device, rows, rank + rope + 40)[:, 40:]
    positions, slots, norm = torch.tensor([0, 11, 12, 49], device=device), torch.tensor([3, 1, 7, 6], device=device), numbers(device, rank)
    caches = [torch.full((8, 1, rank + rope), torch.nan, device=device) for _ in range(2)]
    both = [
        kernel(q, down, positions, cos, sin, slots, cache, norm, 1e-6, nope, interleaved)
        for kernel, cache in zip((latent_store, reference.latent_store), caches, strict=True)
    ]
    same(*both)
    torch.testing.assert_close(*caches, equal_nan=True, atol=2e-5, rtol=2e-5)
    query = torch.full((rows, heads, rank + rope), torch.nan, device=device)
    latent_store(q, down, positions, cos, sin, slots, caches[0], norm, 1e-6, nope, interleaved, query[..., rank:])
    # Not bitwise: for another alignment of the rows another kernel is compiled.
    torch.testing.assert_close(query[..., rank:], both[0], atol=2e-6, rtol=2e-6)
    assert query[..., :rank].isnan().all()


@pytest.mark.parametrize("block", [1, 4, 16])
def test_heads_of_a_program_do_not_change_numbers(device: torch.device, block: int) -> None:
    heads, kv_heads, dim, (cos, sin), positions = 5, 2, 48, tables(device, 48), torch.tensor([7, 0], device=device)
    qkv, norm = numbers(device, 2, heads + 2 * kv_heads, dim), numbers(device, dim)
    caches = [[torch.zeros(2, kv_heads, dim, device=device) for _ in range(2)] for _ in range(2)]
    slots = torch.tensor([1, 0], device=device)
    expected = rope_store(qkv, positions, cos, sin, slots, *caches[0], heads, norm, norm)
    with tuned.override("rope_store", {"BH": block, "warps": 1}):
        assert torch.equal(rope_store(qkv, positions, cos, sin, slots, *caches[1], heads, norm, norm), expected)
    assert all(torch.equal(*pair) for pair in zip(*caches, strict=True))


def test_a_rows_numbers_do_not_depend_on_others(device: torch.device) -> None:
    rows, heads, kv_heads, dim, dtype, (cos, sin) = 33, 9, 2, 128, torch.float16, tables(device, 128)
    qkv, norm = numbers(device, rows, heads + 2 * kv_heads, dim, dtype=dtype), numbers(device, dim, dtype=dtype)
    positions = torch.arange(rows, device=device)
    x, residual, weight = (numbers(device, *shape, dtype=dtype, seed=3) for shape in ((rows, 1030), (rows, 1030), (1030,)))

    def outputs(part: slice) -> list[Tensor]:
        caches = [torch.zeros(rows, kv_heads, dim, dtype=dtype, device=device) for _ in range(2)]
        q = rope_store(qkv[part], positions[part], cos, sin, positions[part], *caches, heads, norm, norm)
        return [q, *(cache[part] for cache in caches), *add_rms_norm(x[part], residual[part], weight, 1e-6), silu_mul(x[part])]

    together, apart = outputs(slice(rows)), [outputs(slice(i, i + 1)) for i in (0, 7, rows - 1)]
    for i, alone in zip((0, 7, rows - 1), apart, strict=True):
        assert all(torch.equal(part[0], whole[i]) for part, whole in zip(alone, together, strict=True))


def test_products_of_heads_go_into_a_part_of_something_wider(device: torch.device) -> None:
    kv_up, x = numbers(device, 3 * (16 + 8), 40), numbers(device, 5, 3, 16 + 4)[..., :16]
    for up, given in zip(triton_kernels.triton_kernels().pack_heads(kv_up, 3, 16), (x, numbers(device, 5, 3, 40)), strict=True):
        expected = torch.stack([given[:, head] @ up.args[0][head] for head in range(3)], 1)
        wide = torch.full((5, 3, expected.shape[2] + 7), torch.nan, device=device)
        up(given, wide[..., 3:-4])
        torch.testing.assert_close(up(given), expected)
        torch.testing.assert_close(wide[..., 3:-4], expected)
        assert wide[..., :3].isnan().all() and wide[..., -4:].isnan().all() and up(given).is_contiguous()


def test_a_float8_cache_cuts_off_what_is_too_large(device: torch.device) -> None:
    (cos, sin), positions, slots = tables(device, 32), torch.zeros(1, dtype=torch.int64, device=device), torch.tensor([3], device=device)
    x = torch.zeros(1, 3, 32, device=device)
    # The interpreter makes a number of NaN in float8; a GPU must keep it. Two, as neighbours are rotated together.
    others = [torch.nan, torch.nan] if device.type == "cuda" else [2.0, 0.5]
    expected = torch.tensor([448.0, -448.0, *others], device=device)
    x[:, 1:] = torch.tensor([1e4, -1e4, *others], device=device).repeat(8)
    caches = [torch.zeros(8, 1, 32, device=device).to(torch.float8_e4m3fn) for _ in range(2)]
    rope_store(x, positions, cos, sin, slots, *caches, 1)
    latent = torch.zeros(8, 1, 64, device=device).to(torch.float8_e4m3fn)
    down, norm = torch.cat([torch.ones(1, 32, device=device), x[:, 1]], 1), torch.full((32,), 1e4, device=device)
    latent_store(x[:, :1].repeat(1, 1, 2), down, positions, cos, sin, slots, latent, norm, 1e-6, 32)
    for actual in (*(cache[3, 0] for cache in caches), latent[3, 0, 32:]):
        torch.testing.assert_close(actual.float()[:4], expected, equal_nan=True)
    assert (latent[3, 0, :32].float() == 448).all()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 64, 128), (4, 100, 300), (16, 130, 64), (33, 7, 1000), (64, 256, 256)])
def test_skinny_linear(device: torch.device, rows: int, outputs: int, inputs: int, bias: bool) -> None:
    for dtype in (torch.float32, torch.float16):
        x, weight = numbers(device, rows, inputs + 8, dtype=dtype)[:, :inputs] / 8, numbers(device, outputs, inputs, dtype=dtype) / 4
        b = numbers(device, outputs, dtype=dtype) if bias else None
        for splits in (None, 1, 3):
            actual, expected = skinny_linear(x, weight, b, splits=splits), reference.linear(x, weight, b)
            tolerance = 4e-3 if dtype == torch.float16 else 1e-4
            torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


def test_the_sum_over_parts_has_one_order(device: torch.device) -> None:
    x, weight = numbers(device, 3, 2048), numbers(device, 70, 2048)
    alone = torch.cat([skinny_linear(row, weight, splits=4) for row in x.split(1)])
    assert torch.equal(alone, skinny_linear(x, weight, splits=4))
