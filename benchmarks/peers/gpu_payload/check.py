"""Whether the kernels of the slimmed libraries run on this GPU and compute what they should. Ends with 1 if not.

FlashAttention 3 over pages, with heads of 64 and 128, one and four rows of each request, pages of 16 and 128 tokens, against attention in
float32; and three kernels of vLLM's own library. Errors are norms of differences over norms.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from itertools import product

import torch
from torch import Tensor
from torch.nn.functional import silu

BF16_ERROR = 2e-2
LENGTHS = (5, 131, 300, 77)  # tokens of the requests
KV_HEADS, HEADS = 2, 8


def random(*size: int) -> Tensor:
    return torch.randn(*size, device="cuda", dtype=torch.bfloat16)


def compare(name: str, result: Tensor, target: Tensor, most: float = BF16_ERROR) -> None:
    """Raises ArithmeticError where the error is `most` or more, or NaN."""
    error = (result.float() - target.float()).norm().item() / target.float().norm().item()
    print(f"{name:44} error {error:.1e}", flush=True)
    if not error < most:
        raise ArithmeticError(f"{name}: the error must be below {most:g}, got {error:g}")


def attention(head: int, rows: int, page: int) -> None:
    from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func

    longest, requests = max(LENGTHS), len(LENGTHS)
    num_pages = -(-longest // page)
    cache = random(2, requests * num_pages, page, KV_HEADS, head)
    block_table = torch.randperm(requests * num_pages, device="cuda", dtype=torch.int32).view(requests, num_pages)
    q = random(requests * rows, HEADS, head)
    begins = torch.arange(0, (requests + 1) * rows, rows, device="cuda", dtype=torch.int32)
    seqused = torch.tensor(LENGTHS, device="cuda", dtype=torch.int32)
    result = flash_attn_varlen_func(
        q, cache[0], cache[1], max_seqlen_q=rows, cu_seqlens_q=begins, max_seqlen_k=longest, seqused_k=seqused, block_table=block_table,
        causal=True, fa_version=3,
    )  # fmt: skip
    target = [reference(q[i * rows : (i + 1) * rows], cache[:, block_table[i].long()], length) for i, length in enumerate(LENGTHS)]
    compare(f"FA3 head {head} rows {rows} page {page}", result, torch.cat(target))


def reference(q: Tensor, pages: Tensor, length: int) -> Tensor:
    """q: [rows, heads, dim], the last ones of `length` tokens; pages: [2, pages, page, kv heads, dim]. In float32."""
    rows, heads, dim = q.shape
    k, v = (side.flatten(0, 1)[:length].float().repeat_interleave(heads // KV_HEADS, 1) for side in pages)
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) * dim**-0.5
    position = torch.arange(length - rows, length, device="cuda")
    scores.masked_fill_(torch.arange(length, device="cuda")[None, None] > position[None, :, None], float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


def norm() -> None:
    import vllm._custom_ops as ops

    x, weight = random(7, 4096), random(4096)
    result = torch.empty_like(x)
    ops.rms_norm(result, x, weight, 1e-6)
    compare("rms_norm", result, x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6) * weight.float())


def activation() -> None:
    import vllm._custom_ops  # noqa: F401  registers the operators

    x, result = random(7, 4096), random(7, 2048)
    torch.ops._C.silu_and_mul(result, x)
    compare("silu_and_mul", result, silu(x[:, :2048].float()) * x[:, 2048:].float())


def cache() -> None:
    import vllm._custom_ops as ops

    keys, pages = random(2, 5, KV_HEADS, 128), torch.zeros(2, 3, 16, KV_HEADS, 128, device="cuda", dtype=torch.bfloat16)
    slot_mapping, one = torch.tensor([0, 17, 40, 5, 33], device="cuda"), torch.ones(1, device="cuda")
    ops.reshape_and_cache_flash(keys[0], keys[1], pages[0], pages[1], slot_mapping, "auto", one, one)
    compare("reshape_and_cache_flash", pages.flatten(1, 2)[:, slot_mapping], keys, 1e-6)


def failures(checks: list[tuple[Callable[..., None], tuple[int, ...]]]) -> int:
    count = 0
    for check, arguments in checks:
        try:
            check(*arguments)
        except Exception as error:  # a library that the driver refuses must not hide what the others do
            count += 1
            print(f"FAILED {check.__name__}{arguments}: {error!r:.300}", flush=True)
    return count


def main() -> None:
    start_time = time.perf_counter()
    torch.manual_seed(0)
    cases = list(product((128, 64), (1, 4), (16, 128)))
    count = failures([(norm, ()), (activation, ()), (cache, ()), *((attention, case) for case in cases)])
    print(f"{count} of {len(cases) + 3} checks failed, {time.perf_counter() - start_time:.1f} s", flush=True)
    sys.exit(bool(count))


if __name__ == "__main__":
    main()
