"""The Ray Serve app's options, on a Ray that is made up. test_trials.py has a real one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from mtpserve.config import EngineConfig, ModelConfig, ParallelConfig, SchedulerConfig
from mtpserve.core.errors import ConfigError

MODULE = "mtpserve.integrations.ray"


class Bound:
    """What `serve.deployment(**options)(cls).bind(*arguments)` was told."""

    def __init__(self, **options: Any) -> None:
        self.options = options

    def __call__(self, cls: type) -> Bound:
        self.cls = cls
        return self

    def bind(self, *arguments: Any) -> Bound:
        self.arguments = arguments
        return self


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """On a cluster that is made up, with two GPUs."""
    ray, serve = ModuleType("ray"), ModuleType("ray.serve")
    ray.serve, ray.is_initialized, ray.cluster_resources = serve, lambda: True, lambda: {"GPU": 2.0}  # type: ignore[attr-defined]
    serve.deployment, serve.Application = Bound, SimpleNamespace  # type: ignore[attr-defined]
    for name, fake in (("ray", ray), ("ray.serve", serve)):
        monkeypatch.setitem(sys.modules, name, fake)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    yield import_module(MODULE)
    sys.modules.pop(MODULE, None)


def test_an_app_from_options(module: ModuleType) -> None:
    found = module.app({"model": "demo", "max_running_requests": "8", "device": "cpu", "deployment": '{"num_replicas": 3}'})
    assert found.cls is module.ServedReplica and found.arguments[0].engine.scheduler.max_running_requests == 8
    assert found.options.pop("health_check_period_s") <= 1
    assert {name: found.options[name] for name in ("name", "num_replicas", "max_ongoing_requests")} == {
        "name": "mtpserve", "num_replicas": 3, "max_ongoing_requests": 16,
    }  # fmt: skip
    assert "ray_actor_options" not in found.options and "autoscaling_config" not in found.options


def test_replicas_are_scaled_by_their_requests(module: ModuleType) -> None:
    engine = EngineConfig(scheduler=SchedulerConfig(max_running_requests=8), parallel=ParallelConfig(data_parallel_size=2))
    scaled = module.deployment(engine, {"autoscaling_config": {"max_replicas": 4}}, False)
    assert scaled["autoscaling_config"] == {"target_ongoing_requests": 16, "max_replicas": 4}
    own = {"target_ongoing_requests": 5}
    assert module.deployment(engine, {"autoscaling_config": own}, False)["autoscaling_config"] == own
    assert module.deployment(engine, {"autoscaling_config": None}, False)["autoscaling_config"] is None


@pytest.mark.parametrize(
    ("device", "has_gpus", "wanted"), [("auto", True, 2), ("auto", False, None), ("cuda", False, 2), ("cpu", True, None)]
)
def test_a_gpu_for_each_device_of_a_replica(module: ModuleType, device: str, has_gpus: bool, wanted: int | None) -> None:
    engine = EngineConfig(model=ModelConfig(device=device), parallel=ParallelConfig(data_parallel_size=2))
    assert module.deployment(engine, {}, has_gpus).get("ray_actor_options", {}).get("num_gpus") == wanted
    assert module.deployment(engine, {"ray_actor_options": {"num_cpus": 4}}, has_gpus)["ray_actor_options"] == {"num_cpus": 4}


@pytest.mark.parametrize(
    ("args", "told"),
    [
        ({"port": 8000}, "--port is Ray's here"),
        ({"deployment": "two"}, "deployment must have options of Ray's deployments, as JSON, got 'two'"),
        ({"num_replicas": 2}, "unknown key 'num_replicas'"),
    ],
)
def test_what_is_refused(module: ModuleType, args: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        module.app(args)
    assert told in str(refused.value)
