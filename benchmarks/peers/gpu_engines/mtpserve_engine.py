"""mtpserve, by its engine: token ids in and out, no tokenizer, no prefix cache, a fixed number of drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from peers.gpu_engines.load import ACCEPT_CURVE, Sizes
from peers.gpu_engines.shapes import kv_bytes as token_bytes, read_config


class MtpserveEngine:
    def __init__(self, directory: Path, drafts: int, sizes: Sizes, kv_bytes: int, options: dict[str, Any]) -> None:
        """`options`: more of SchedulerConfig."""
        from mtpserve.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, SpecConfig
        from mtpserve.engine.startup.build import build_engine

        spec = SpecConfig(speculative_algorithm="none")
        if drafts:
            spec = SpecConfig(
                speculative_algorithm="MTP",
                speculative_num_steps=drafts,
                speculative_adaptive=False,
                speculative_synthetic_acceptance=",".join(map(str, ACCEPT_CURVE[:drafts])),
            )
        length, max_batch = sizes.context_length(drafts), sizes.max_batch
        max_tokens = kv_bytes // token_bytes(read_config(directory), drafts)
        self.engine = build_engine(
            EngineConfig(
                model=ModelConfig(model=str(directory), load_format="dummy", context_length=length, dtype="auto"),
                cache=CacheConfig(max_total_tokens=max_tokens, disable_radix_cache=True),
                spec=spec,
                scheduler=SchedulerConfig(**{"max_running_requests": max_batch} | options),
            )
        )
        self.request_ids: dict[str, None] = {}

    def add(self, request_id: str, prompt: list[int], max_tokens: int) -> None:
        from mtpserve.core.request import Request
        from mtpserve.core.sampling import SamplingParams

        self.engine.add(Request(request_id, prompt, SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)))
        self.request_ids[request_id] = None

    def step(self) -> dict[str, int]:
        """Raises RuntimeError for a request that failed."""
        counts: dict[str, int] = {}
        for event in self.engine.step():
            if event.error:
                raise RuntimeError(f"request {event.id}: {event.error}")
            if event.tokens:
                counts[event.id] = counts.get(event.id, 0) + len(event.tokens)
            if event.finish is not None:
                self.request_ids.pop(event.id, None)
        return counts

    @property
    def has_unfinished_requests(self) -> bool:
        return self.engine.has_work

    def abort_all(self) -> None:
        for request_id in self.request_ids:
            self.engine.abort(request_id)
        self.request_ids.clear()
        while self.has_unfinished_requests:
            self.engine.step()

    def settings(self) -> dict[str, str]:
        import mtpserve

        return {"version": mtpserve.__version__, "kernels": str(self.engine.card.kernels)}
