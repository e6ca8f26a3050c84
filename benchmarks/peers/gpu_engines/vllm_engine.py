"""vLLM, by its offline interface: token ids in and out, no detokenizer, no prefix cache, as many graphs as batches need.

Its scheduler and model run in a process of their own, as by default. The arguments are those of vLLM 0.26.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from peers.gpu_engines.load import Sizes, acceptance_rates

SETTLE_SECONDS = 0.3  # its own process may have begun further steps
MEMORY_SHARE = 0.05  # is checked at start though the KV cache's size is given, and other engines have memory too
CAPTURE_BATCHES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)


def llm_arguments(directory: Path, drafts: int, sizes: Sizes, kv_bytes: int, options: dict[str, Any]) -> dict[str, Any]:
    """Of vllm.LLM. `options` come last."""
    rows = (1, drafts + 1)
    batches = {batch for batch in (*CAPTURE_BATCHES, *sizes.batches) if batch <= sizes.max_batch}
    arguments: dict[str, Any] = {
        "model": str(directory),
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "max_model_len": sizes.context_length(drafts),
        "max_num_seqs": sizes.max_batch,
        "enable_prefix_caching": False,
        "generation_config": "vllm",
        "seed": 0,
        "kv_cache_memory_bytes": kv_bytes,
        "gpu_memory_utilization": MEMORY_SHARE,
        # A shorter start than with its own sizes, and no full batch is padded, with drafts or without.
        "compilation_config": {"cudagraph_capture_sizes": sorted({batch * n for batch in batches for n in rows})},
    }
    if drafts:
        arguments["speculative_config"] = {
            "method": "mtp",
            "num_speculative_tokens": drafts,
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_rates": acceptance_rates(drafts),
        }
    return arguments | options


class VllmEngine:
    def __init__(self, directory: Path, drafts: int, sizes: Sizes, kv_bytes: int, options: dict[str, Any]) -> None:
        from vllm import LLM, SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self.engine = LLM(**llm_arguments(directory, drafts, sizes, kv_bytes, options)).llm_engine
        self.request_ids: dict[str, None] = {}
        self.params = lambda max_tokens: SamplingParams(
            temperature=0.0, ignore_eos=True, max_tokens=max_tokens, detokenize=False, output_kind=RequestOutputKind.DELTA
        )

    def add(self, request_id: str, prompt: list[int], max_tokens: int) -> None:
        self.engine.add_request(request_id, {"prompt_token_ids": prompt}, self.params(max_tokens))
        self.request_ids[request_id] = None

    def step(self) -> dict[str, int]:
        counts = {}
        for output in self.engine.step():
            if new_tokens := len(output.outputs[0].token_ids):
                counts[output.request_id] = new_tokens
            if output.finished:
                self.request_ids.pop(output.request_id, None)
        return counts

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self.engine.has_unfinished_requests())

    def abort_all(self) -> None:
        self.engine.abort_request(list(self.request_ids))
        self.request_ids.clear()
        while self.has_unfinished_requests:
            self.engine.step()
        time.sleep(SETTLE_SECONDS)

    def settings(self) -> dict[str, str]:
        import vllm

        config = self.engine.vllm_config
        return {
            "version": vllm.__version__,
            "async_scheduling": str(config.scheduler_config.async_scheduling),
            "cudagraph_mode": str(config.compilation_config.cudagraph_mode),
            "max_num_batched_tokens": str(config.scheduler_config.max_num_batched_tokens),
            "model_runner": "V2" if getattr(config, "use_v2_model_runner", False) else "V1",
        }
