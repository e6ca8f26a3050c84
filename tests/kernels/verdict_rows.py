"""What the matrix compiles of verdicts and of drafts: a vocabulary of several chunks, one of a single one, chains and the widest tree."""

from __future__ import annotations

import torch


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def launch() -> None:
    """Calls the wrappers with tensors on the CPU."""
    from mtpserve_kernels.spec.accept import accept
    from mtpserve_kernels.spec.argmax import argmax
    from mtpserve_kernels.spec.draw import draw

    for vocab in (151936, 2000):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            argmax(torch.zeros(2, vocab, dtype=dtype))
        sampling = torch.zeros(4), ints(4), torch.zeros(4), torch.zeros(4), ints(4), torch.zeros(4, dtype=torch.bool)
        for q, coupled in ((torch.zeros(2, vocab), sampling[-1]), (None, sampling[-1]), (None, None)):
            numbers = torch.zeros(2, vocab), ints(2), ints(2), *sampling[:-1], coupled, q
            draw(*numbers)
            draw(*numbers, any_top_k=False, any_top_p=False, any_min_p=False)
        for nodes, depth in ((1, 0), (4, 3), (64, 8)):
            parents, depths = (ints(2, nodes - 1), ints(2, nodes)) if nodes > depth + 1 else (None, None)
            q = torch.zeros(4, nodes - 1, vocab) if nodes == 4 else None
            tree = parents, depths, ints(2), ints(4)
            verdict = torch.zeros(2, nodes, vocab), ints(2 * nodes), ints(2), *tree, *sampling, q, depth
            rows = ints(2, nodes)
            accept(*verdict, sample_rows=rows, all_greedy=True)
            accept(*verdict, sample_rows=rows)
            accept(*verdict, sample_rows=rows, any_top_k=False, any_top_p=False, any_min_p=False)
