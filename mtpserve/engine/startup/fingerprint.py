"""What keys and values depend on besides tokens, as 16 bytes: pages of engines with equal fingerprints may be
exchanged by their keys."""

from __future__ import annotations

import os
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path

from mtpserve.config import EngineConfig
from mtpserve.engine.startup.compute import described
from mtpserve.engine.startup.planning import Plan
from mtpserve.weights.checkpoint.checkpoint import Checkpoint

SAMPLE = 512  # bytes of each tensor that are read
VERSION = b"mtpserve pages 2"  # the version of what a page holds, and in which order


def fingerprint(config: EngineConfig, engine_plan: Plan) -> bytes:
    """Returns a hash of the model, its weights, the number formats, the kernels, and the layers that share a
    page."""
    hasher = blake2b(VERSION, digest_size=16)
    model, spec = engine_plan.described, config.spec
    facts = (
        *(
            model.arch,
            model.dummy,
            engine_plan.dtype,
            engine_plan.storage,
            config.model.quantization,
            described(config, engine_plan.device),
        ),
        *(engine_plan.config.cache.page_size, spec.parts, spec.exact, config.parallel.ranks),
        *(("experts",) if config.sampling.enable_return_routed_experts else ()),
    )
    hasher.update(repr(facts).encode())
    for checkpoint in model.checkpoints:
        for piece in _samples(checkpoint):
            hasher.update(piece)
    return hasher.digest()


def facts(config: EngineConfig, engine_plan: Plan) -> dict[str, str]:
    """The same by names for people, by which two nodes see in what they differ."""
    storage = engine_plan.storage
    return {
        "version of pages": VERSION.decode(),
        "page size": str(engine_plan.config.cache.page_size),
        "--tensor-parallel-size": str(config.parallel.ranks),
        "number format": f"{engine_plan.dtype}, keys and values {storage.cache}",
        "layers in a page": f"{config.spec.parts}, exact {config.spec.exact}",
        "--enable-return-routed-experts": str(config.sampling.enable_return_routed_experts),
        "kernels": described(config, engine_plan.device),
        "model": f"{engine_plan.described.arch.family}, fingerprint {fingerprint(config, engine_plan).hex()}",
    }


def _samples(checkpoint: Checkpoint) -> Iterable[bytes]:
    """Yields each tensor's name and form, and some bytes from its middle: two trainings of one model differ
    in nearly all of them. Copied files are the same."""
    files: dict[Path, int] = {}
    try:
        for name, entry in sorted(checkpoint.tensors.items()):
            if entry.file not in files:
                files[entry.file] = os.open(entry.file, os.O_RDONLY)
            middle = entry.start + max(entry.size - SAMPLE, 0) // 2
            yield repr((name, entry.dtype, entry.shape)).encode()
            yield os.pread(files[entry.file], min(SAMPLE, entry.size), middle)
    finally:
        for descriptor in files.values():
            os.close(descriptor)
