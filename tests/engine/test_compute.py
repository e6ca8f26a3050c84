"""Which kernels, which number format: by instruction set, compiler and options."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from mtpserve_kernels.cpu import build, library
from mtpserve_kernels.cpu.library import Unavailable

from mtpserve.config import CacheConfig, EngineConfig, ModelConfig
from mtpserve.core.errors import ConfigError
from mtpserve.core.sampling import SamplingParams
from mtpserve.engine.startup import compute
from mtpserve.engine.startup.build import build_engine
from mtpserve.engine.startup.planning import plan
from tests.tiny import run, tiny_arch

CPU, DEMO = torch.device("cpu"), EngineConfig(model=ModelConfig(device="cpu"))
ARCH = replace(tiny_arch(), dtype="bfloat16")


@pytest.fixture(params=[True, False], ids=["kernels", "no kernels"])
def there(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    if request.param:
        try:
            library.library()
        except Unavailable as reason:
            pytest.skip(str(reason))
    else:
        monkeypatch.setenv("MTPSERVE_CPU_ISA", "none")
        monkeypatch.setattr(library, "in_use", [])
        library.chosen.cache_clear()
    yield bool(request.param)
    library.chosen.cache_clear()


def test_what_is_chosen(there: bool) -> None:
    assert compute.backend_of(DEMO, CPU) == ("cpu" if there else "reference")
    assert compute.kernels_of(DEMO, CPU) == ("cpu" if there else "torch")
    assert compute.dtype_of(DEMO, ARCH, CPU) == (torch.bfloat16 if there or compute.has_bfloat16_units() else torch.float32)
    assert compute.dtype_of(DEMO, replace(ARCH, dtype="float16"), CPU) == torch.float32
    said = compute.described(DEMO, CPU)
    assert said == f"cpu, {library.library().isa.name}" if there else said == "torch (MTPSERVE_CPU_ISA=none)"


def test_a_text_with_and_without_kernels(there: bool) -> None:
    """In float32, as the kernels round otherwise than torch."""
    engine = build_engine(EngineConfig(model=ModelConfig(device="cpu", dtype="float32"), cache=CacheConfig(max_total_tokens=1024)))
    assert engine.card.kernels.startswith("cpu" if there else "torch")
    texts = run(engine, [[40, 41, 300], [270]], SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))
    forced = ModelConfig(device="cpu", dtype="float32", attention_backend="reference")
    again = build_engine(EngineConfig(model=forced, cache=CacheConfig(max_total_tokens=1024)))
    assert texts == run(again, [[40, 41, 300], [270]], SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))


def test_asked_for_by_name(there: bool) -> None:
    asked = EngineConfig(model=ModelConfig(device="cpu", attention_backend="cpu"))
    if there:
        assert plan(asked).dtype == torch.bfloat16
        return
    with pytest.raises(ConfigError, match="--attention-backend cpu: MTPSERVE_CPU_ISA=none"):
        plan(asked)


@pytest.mark.parametrize(
    ("model", "cache", "why"),
    [
        ({"dtype": "float16"}, {}, "float16 is computed in plain torch"),
        ({"quantization": "fp8"}, {}, "float8 is computed in plain torch"),
        ({}, {"kv_cache_dtype": "fp8"}, "float8 is computed in plain torch"),
    ],
)
def test_formats_that_stay_with_torch(model: dict[str, str], cache: dict[str, str], why: str) -> None:
    asked = EngineConfig(model=ModelConfig(device="cpu", **model), cache=CacheConfig(**cache))
    assert compute.backend_of(asked, CPU) == "reference" and compute.why_not_cpu(asked, CPU) == why


def test_each_instruction_set_is_known_by_its_name() -> None:
    assert len({isa.name for isa in build.INSTRUCTION_SETS}) == len(build.INSTRUCTION_SETS)
