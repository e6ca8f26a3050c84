"""Runs spans through the real model, cache and attention without an engine, and keeps the logits of every row."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path

import torch
from torch import Tensor

from mtpserve.cache.states import States
from mtpserve.cache.stores import Stores
from mtpserve.config import EngineConfig, ModelConfig
from mtpserve.core.arch.model import Features, attending, page_groups, recurrent_kinds
from mtpserve.core.plan import NewRequest
from mtpserve.core.request import Request
from mtpserve.core.sampling import SamplingParams
from mtpserve.core.spec_sizes import SpecSizes
from mtpserve.engine.startup.assemble import recur_of, trunk_attention
from mtpserve.engine.startup.planning import describe, load_model
from mtpserve.engine.startup.storage import Storage
from mtpserve.layers.kernels import KERNELS
from mtpserve.runtime.admissions import seat
from mtpserve.runtime.device_requests import DeviceRequests
from mtpserve.runtime.inputs import build, row_layout
from mtpserve.runtime.runner_request import RunnerRequest
from mtpserve.runtime.sampling.rules import LogitRules
from mtpserve.runtime.sampling.sampling import BatchSampler, SamplingFeatures, SamplingState

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SIZES = SpecSizes(steps=4, num_proposed=4, written=4)


class Harness:
    """`prompts` are what the spans run over. The pools are poisoned with NaN and the pages are dealt out of order. Where there is a GPU,
    Triton's kernels run there."""

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
        self.device = device = CUDA if backend == "triton" and torch.cuda.is_available() else CPU
        found = describe(EngineConfig(model=ModelConfig(model=str(directory), device=device.type)), want_mtp=with_mtp)
        arch, longest = found.arch, max(map(len, prompts))
        groups = page_groups(arch.layers)
        each = -(-(longest + SIZES.num_lookahead_tokens(0)) // page_size)
        spare = [each * len(prompts)] * len(groups)  # the last page: what is written there is nobody's
        self.seats = DeviceRequests(len(prompts), longest, SIZES, arch.vocab, page_size, device, spare_pages=spare)
        self.sampling = SamplingState(len(prompts), LogitRules(self.seats, len(prompts), arch.vocab, (), (), device), device)
        kernels = KERNELS.get({"reference": "torch"}.get(backend, backend))()
        kept = Storage(keep_blocks, torch.float32, keep_int4=keep_blocks)
        self.model = load_model(found, torch.float32, device, longest + SIZES.num_lookahead_tokens(0), kernels, False, kept)
        generator = torch.Generator().manual_seed(3)
        orders = [torch.randperm(each * len(prompts), generator=generator).tolist() for _ in groups]
        trunk, layers = arch.layers[: arch.num_layers], attending(arch.layers)
        self.stores = Stores(layers, [page + 1 for page in spare], page_size, torch.float32, device, poison=True, kv_dtype=cache)
        kinds = recurrent_kinds(trunk)
        states = States(kinds, len(prompts) + 1, SIZES.nodes, 1, torch.float32, device, poison=True) if kinds else None
        self.attention = trunk_attention(backend, arch, self.stores, states, recur_of(backend))
        self.prompts, self.computed = prompts, [0] * len(prompts)
        params = SamplingParams(temperature=0)
        self.records = [
            RunnerRequest(NewRequest(i, Request(str(i), list(prompt), params, seed=i), [], 0, longest)) for i, prompt in enumerate(prompts)
        ]
        entries = [
            (group, i, column, page)
            for i in range(len(prompts))
            for group, order in enumerate(orders)
            for column, page in enumerate(order[i * each : (i + 1) * each])
        ]
        seat(self.records, entries, self.seats, self.sampling)

    @torch.inference_mode()
    def step(self, widths: Seq[int], drafts: int = 0) -> list[Tensor]:
        """Give span i `widths[i]` rows, fewer at its end; the last `drafts` of them as drafts → logits [rows, vocabulary] for each."""
        rows = [min(width, len(prompt) - done) for width, prompt, done in zip(widths, self.prompts, self.computed, strict=True)]
        running = [i for i, number in enumerate(rows) if number]
        proposed = [min(drafts, rows[i] - 1) for i in running]
        ends = [self.computed[i] + rows[i] == len(self.prompts[i]) for i in running]
        layout = tuple((rows[i] - count, count, end and not count) for i, count, end in zip(running, proposed, ends, strict=True))
        sampler = BatchSampler(self.sampling, SamplingFeatures.of([self.records[i] for i in running], False))
        batch = build(row_layout(layout, self.device), self.seats, torch.tensor(running, device=self.device), sampler, False)
        hidden = self.model.trunk(batch.input_ids, batch.positions, self.attention.plan(batch), Features())
        by_span = iter(self.model.logits(hidden.head).cpu().split([rows[i] for i in running]))
        for i in running:
            self.computed[i] += rows[i]
            self.seats.num_computed_tokens[i] += rows[i]
            self.forget(i)
        return [next(by_span) if number else torch.empty(0, self.model.arch.vocab) for number in rows]

    def forget(self, i: int) -> None:
        """NaN for what no later row of the request sees, in the stores of layers with a window."""
        for kind, pool, group, *_ in self.stores.stores:
            unseen = 0 if kind.kv_window is None else max(self.computed[i] - kind.kv_window + 1, 0)
            for part in pool.parts:
                part[:, self.seats.slot_mapping(torch.tensor(i, device=self.device), torch.arange(unseen, device=self.device), group)] = (
                    torch.nan
                )

    def all_logits(self, widths: Seq[int], drafts: int = 0) -> list[Tensor]:
        """Steps of these widths until everything is computed → logits [tokens, vocabulary] for each sequence."""
        rows: list[list[Tensor]] = [[] for _ in self.prompts]
        while any(done < len(prompt) for done, prompt in zip(self.computed, self.prompts, strict=True)):
            for found, new in zip(rows, self.step(widths, drafts), strict=True):
                found.append(new)
        return [torch.cat(found) for found in rows]
