"""Options as other projects hand them on."""

from __future__ import annotations

import pytest

from mtpserve.core.errors import ConfigError
from mtpserve.integrations.engines import checked_settings, values_of


def test_options_as_texts_and_as_values() -> None:
    args = {
        "model": "demo", "speculative-algorithm": "NEXTN", "max_total_tokens": "4096", "tp": 1, "log_requests": "true",
        "speculative_config": {"num_speculative_tokens": 2}, "scheduler": {"max_running_requests": 8},
    }  # fmt: skip
    found = checked_settings(values_of(args), ("port",), "Ray's")
    assert (found.engine.model.model, found.engine.spec.speculative_algorithm, found.engine.spec.speculative_num_steps) == (
        "demo",
        "NEXTN",
        2,
    )
    assert (found.engine.cache.max_total_tokens, found.engine.scheduler.max_running_requests) == (4096, 8)
    assert found.server.log_requests


@pytest.mark.parametrize(
    ("args", "told"),
    [
        ({"port": 1}, "--port is Ray's here and cannot be set"),
        ({"drain-timeout": "1"}, "--drain-timeout is Ray's here and cannot be set"),
        ({"modle": "demo"}, "unknown key 'modle'"),
        ({"max_total_tokens": "many"}, "--max-total-tokens must be a whole number, got 'many'"),
    ],
)
def test_what_is_refused(args: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        checked_settings(values_of(args), ("port", "drain_timeout"), "Ray's")
    assert told in str(refused.value)
