"""The log line that says every few seconds what the engine does. Differences of its counters; nothing when
nothing runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from time import monotonic

from mtpserve.core.stats.engine_stats import EngineStats
from mtpserve.server.observe.observed import cached_share

log = logging.getLogger(__name__)


def line(before: EngineStats, now: EngineStats, seconds: float, synthetic: str | None = None) -> str:
    """`synthetic`: the curve of synthetic acceptance, where there is one."""
    tokens = (now.generation_tokens_total - before.generation_tokens_total) / seconds
    prompt = (now.prompt_tokens_total - before.prompt_tokens_total) / seconds
    share = 100 * now.page_share
    text = (
        f"running {now.running}  waiting {now.waiting}  pages {now.pages_used}/{now.pages_total} "
        f"({share:.0f} %)"
    )
    for tier, total in now.tier_pages_total.items():
        text += f"  {tier} {now.tier_pages.get(tier, 0)}/{total} pages"
    text += f"  prompt {prompt:.1f} tok/s"
    cached = cached_share(now, before)
    if cached is not None:
        text += f"  cached {100 * cached:.0f} %"
    text += f"  generation {tokens:.1f} tok/s"
    length = now.accept_length(before)
    if length is not None:
        text += f"  accept length {length:.2f}"
    if now.depths is not None and now.depths.adaptive:
        text += f"  depth {now.depths.depth}"
    return text if synthetic is None else f"{text}  SYNTHETIC ACCEPTANCE {synthetic}"


async def report(stats: Callable[[], EngineStats], interval: float, synthetic: str | None = None) -> None:
    """Runs until it is cancelled. An interval of 0: no lines."""
    if interval == 0:
        return
    before, at = stats(), monotonic()
    while True:
        await asyncio.sleep(interval)
        now, then, at = stats(), at, monotonic()
        if now.running or now.waiting or now.generation_tokens_total > before.generation_tokens_total:
            log.info("%s", line(before, now, at - then, synthetic))
        before = now
