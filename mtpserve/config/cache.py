"""The KV pool, the prefix cache, and its tiers below the device."""

from __future__ import annotations

from dataclasses import dataclass

from mtpserve.config.kv_events import KVEventsConfig, parse
from mtpserve.config.options import USUAL_PAGE, check, option

# for pages on their way to the disk; of the disk, unless the user says otherwise
LEAST_HOST_GIB, DISK_GIB = 0.25, 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    page_size: int = option(
        USUAL_PAGE,
        "tokens in one page of the KV cache (128 for models whose layers store an entry per 128 tokens)",
        "block-size",
    )
    max_total_tokens: int | None = option(
        None, "tokens in the KV cache (default: what --mem-fraction-static allows)"
    )
    mem_fraction_static: float | None = option(
        None,
        "fraction of memory for weights and KV cache (default: 0.85 of the free GPU memory, 0.1 of "
        "the RAM on a CPU)",
        "gpu-memory-utilization",
    )
    kv_cache_dtype: str = option(
        "auto",
        "number format of keys and values. fp8_e4m3 (or fp8) halves their memory and rounds to 3 "
        "bits of mantissa; bfloat16; auto: --dtype",
        choices=("auto", "fp8_e4m3", "fp8", "bfloat16"),
        synonyms=(("bf16", "bfloat16"),),
    )
    disable_radix_cache: bool = option(
        False,
        "turn the prefix cache off: each request computes its whole prompt",
        "no-enable-prefix-caching",
    )
    kv_offload_gib: float = option(
        0.0, (
            "host memory for KV pages that are evicted from the device, in GiB; later requests load "
            "these pages instead of computing them again"
        ),
        "kv-offloading-size", "hicache-size",
    )  # fmt: skip
    kv_offload_dir: str | None = option(
        None,
        "folder for KV pages on disk. The pages survive a restart, and the engines of one machine "
        "share them (needs 0.25 GiB of host memory)",
    )
    kv_offload_dir_gib: float | None = option(None, "maximum size of --kv-offload-dir, in GiB (default: 10)")
    kv_events_config: str | None = option(
        None,
        "publish events of the prefix cache, with token ids, for routers: JSON, as in vLLM. "
        '{"publisher": "zmq"} listens on tcp://127.0.0.1:5557; "endpoint": "tcp://*:5557" listens on '
        "all interfaces",
    )

    def __post_init__(self) -> None:
        check(1 <= self.page_size <= 1024, "page_size", self.page_size, "in [1, 1024]")
        check(
            self.max_total_tokens is None or self.max_total_tokens >= 16,
            "max_total_tokens",
            self.max_total_tokens,
            "at least 16",
        )
        fraction = self.mem_fraction_static
        check(fraction is None or 0 < fraction <= 1, "mem_fraction_static", fraction, "in (0, 1]")
        host, disk = self.kv_offload_gib, self.kv_offload_dir_gib
        check(0 <= host < 1 << 20, "kv_offload_gib", host, "at least 0")
        check(
            host == 0 or not self.disable_radix_cache,
            "kv_offload_gib",
            host,
            "left out with --disable-radix-cache",
        )
        folder = self.kv_offload_dir
        check(
            folder is None or not self.disable_radix_cache,
            "kv_offload_dir",
            folder,
            "left out with --disable-radix-cache",
        )
        check(disk is None or 0 < disk < 1 << 20, "kv_offload_dir_gib", disk, "more than 0")
        check(
            disk is None or folder is not None,
            "kv_offload_dir_gib",
            disk,
            "used with --kv-offload-dir only",
        )
        events = self.kv_events_config
        check(
            self.kv_events is None or not self.disable_radix_cache,
            "kv_events_config",
            events,
            "left out with --disable-radix-cache",
        )

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory for pages; 0: there is no tier below the device."""
        least = 0 if self.kv_offload_dir is None else LEAST_HOST_GIB
        return int(max(self.kv_offload_gib, least) * (1 << 30))

    @property
    def disk_bytes(self) -> int:
        return int((DISK_GIB if self.kv_offload_dir_gib is None else self.kv_offload_dir_gib) * (1 << 30))

    @property
    def kv_events(self) -> KVEventsConfig | None:
        """Raises ConfigError for text that means nothing. None: no events."""
        events = None if self.kv_events_config is None else parse(self.kv_events_config)
        return events if events is not None and events.on else None
