"""What pages of two engines must agree in before they are exchanged."""

from __future__ import annotations

from mtpserve.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig, SpecConfig
from mtpserve.engine.startup.drafter import plan_engine
from mtpserve.engine.startup.fingerprint import fingerprint


def made(dtype: str = "float32", page_size: int = 16, cache: str = "auto", ranks: int = 1, **spec: object) -> bytes:
    config = EngineConfig(
        model=ModelConfig(dtype=dtype, context_length=64),
        cache=CacheConfig(max_total_tokens=256, page_size=page_size, kv_cache_dtype=cache),
        spec=SpecConfig(**spec),  # type: ignore[arg-type]
        parallel=ParallelConfig(tensor_parallel_size=ranks),
    )
    plan = plan_engine(config)
    return fingerprint(plan.config, plan)


def test_what_pages_depend_on_is_in_the_fingerprint() -> None:
    drafted = {"speculative_algorithm": "MTP"}
    prints = [
        made(**drafted),
        made("bfloat16", **drafted),
        made(page_size=32, **drafted),
        made(cache="bfloat16", **drafted),
        made(speculative_exact=True, **drafted),
        made(ranks=2, **drafted),
        made(speculative_algorithm="none"),
    ]
    assert len(set(prints)) == len(prints)
    assert made(speculative_num_steps=2, **drafted) == prints[0], "a page does not depend on how many drafts there are"
