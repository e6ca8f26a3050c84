"""Runs spans through the real model, cache and attention without an engine, and keeps the logits of every row."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path

import torch
from torch import Tensor

from mtpserve.attention.registry import BACKENDS
from mtpserve.cache.stores import Stores
from mtpserve.config import EngineConfig, ModelConfig
from mtpserve.core.arch import Features
from mtpserve.core.batch import Span
from mtpserve.core.draft_sizes import DraftSizes
from mtpserve.core.sampling import SamplingParams
from mtpserve.core.sequence import Sequence
from mtpserve.engine.planning import describe, load_model
from mtpserve.layers.kernels import KERNELS
from mtpserve.runtime.inputs import build, rows_of
from mtpserve.runtime.rules import LogitRules
from mtpserve.runtime.sampling import SeatSampling
from mtpserve.runtime.seats import SeatTensors

CPU, SIZES = torch.device("cpu"), DraftSizes(steps=4, proposed=4, written=4)


class Harness:
    """`prompts` are what the spans run over. The pools are poisoned with NaN and the pages are dealt out of order."""

    def __init__(
        self,
        directory: Path,
        prompts: Seq[list[int]],
        page_size: int,
        with_mtp: bool = False,
        keep_blocks: bool = False,
        cache: torch.dtype | None = None,
        backend: str = "reference",
    ) -> None:
        found = describe(EngineConfig(model=ModelConfig(model=str(directory), device="cpu")), want_mtp=with_mtp)
        arch, longest = found.arch, max(map(len, prompts))
        self.seats = SeatTensors(len(prompts), longest, SIZES, arch.vocab, page_size, CPU)
        self.sampling = SeatSampling(len(prompts), LogitRules(self.seats, len(prompts), arch.vocab, (), (), CPU), CPU)
        kernels = KERNELS.get({"reference": "torch"}.get(backend, backend))()
        self.model = load_model(found, torch.float32, CPU, longest + SIZES.lookahead(0), kernels, False, keep_blocks)
        each = -(-(longest + SIZES.lookahead(0)) // page_size)
        order = torch.randperm(each * len(prompts), generator=torch.Generator().manual_seed(3)).tolist()
        self.stores = Stores(arch.layers, len(order), page_size, torch.float32, CPU, poison=True, stored=cache)
        self.attention = BACKENDS.get(backend)(self.stores.part(slice(arch.num_layers)), arch.heads, arch.scale)
        self.seqs = []
        for i, prompt in enumerate(prompts):
            seq = Sequence(str(i), list(prompt), len(prompt), SamplingParams(temperature=0), longest, seed=i, seat=i)
            seq.pages = order[i * each : (i + 1) * each]
            self.seats.admit(seq)
            self.seats.extend_pages(seq)
            self.seqs.append(seq)

    @torch.inference_mode()
    def step(self, widths: Seq[int], drafts: int = 0) -> list[Tensor]:
        """Give span i `widths[i]` rows, fewer at its end; the last `drafts` of them as drafts → logits [rows, vocabulary] for each."""
        spans = []
        for seq, width in zip(self.seqs, widths, strict=True):
            rows = min(width, len(seq.tokens) - seq.computed)
            proposed = min(drafts, rows - 1)
            if rows:
                spans.append(Span.of(seq, rows - proposed, proposed))
        sampler = self.sampling.for_batch([span.seq for span in spans])
        batch = build(rows_of(spans, 0, self.seats, sampler, None), self.seats)
        hidden = self.model.trunk(batch.ids, batch.positions, self.attention.plan(batch), Features())
        by_span = iter(self.model.logits(hidden.head).split([span.width for span in spans]))
        for span in spans:
            span.seq.computed += span.width
            span.seq.launched = span.seq.computed
            self.seats.computed[span.seq.seat] += span.width
            self.forget(span.seq)
        vocab = self.model.arch.vocab
        running = {id(span.seq) for span in spans}
        return [next(by_span) if id(seq) in running else torch.empty(0, vocab) for seq in self.seqs]

    def forget(self, seq: Sequence) -> None:
        """NaN for what no later row of the request sees, in the stores of layers with a window."""
        for kind, pool in self.stores.stores:
            unseen = 0 if kind.window is None else max(seq.computed - kind.window + 1, 0)
            for part in pool.parts:
                part[:, self.seats.slots(torch.tensor(seq.seat), torch.arange(unseen))] = torch.nan

    def all_logits(self, widths: Seq[int], drafts: int = 0) -> list[Tensor]:
        """Steps of these widths until everything is computed → logits [tokens, vocabulary] for each sequence."""
        rows: list[list[Tensor]] = [[] for _ in self.seqs]
        while any(seq.computed < len(seq.tokens) for seq in self.seqs):
            for found, new in zip(rows, self.step(widths, drafts), strict=True):
                found.append(new)
        return [torch.cat(found) for found in rows]
