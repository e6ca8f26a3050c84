"""Models with random weights in real engines, made without checkpoints, and the cells that are measured: one captured step each.

A model is built without memory. Then its weights are drawn on the device, or, to count launches alone, stay fake.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from common.shapes import SHAPES, TOYS
from torch import Tensor, nn

from gpu_kit.launches import Traffic, storage_of
from mtpserve.config import SchedulerConfig, SpecConfig
from mtpserve.core.arch.model import ModelArch, MTPArch, page_groups
from mtpserve.engine.engine import Engine
from mtpserve.engine.startup.assemble import EngineOptions, EngineSizes, assemble
from mtpserve.layers.decoder import DecoderModel, Methods
from mtpserve.layers.kernels import KERNELS
from mtpserve.layers.rope import Rope
from mtpserve.models.registry import family_of
from mtpserve.quant.unquantized import Unquantized
from mtpserve.runtime.graphs.capture import GraphCapturer
from mtpserve.runtime.graphs.graph_key import CapturedGraph, GraphKey
from mtpserve.runtime.graphs.graphs import StepGraphs
from mtpserve.runtime.graphs.prompt_rows import PROMPTS, Prompts
from mtpserve.runtime.runner import Runner
from mtpserve.runtime.sampling.sampling import SamplingFeatures
from mtpserve.weights.checkpoint.hf_config import HFConfig
from mtpserve.weights.dummy import fill
from mtpserve.weights.finish import Finisher

PAGE, ROOM = 64, 64  # tokens of a page; tokens beyond the context that a seat has room for
PROMPT_ROWS = 512
DRAFTS = (0, 3)


@dataclass(frozen=True, slots=True)
class Cell:
    """A step that is measured: `drafts` 0 is plain decoding. With `prompt` it is a graph of so many rows of prompts."""

    model: str
    drafts: int
    requests: int
    context: int  # tokens before the step's rows
    prompt: int = 0

    def __str__(self) -> str:
        if self.prompt:
            return f"{self.model} prompts of {self.prompt} rows"
        return f"{self.model} k={self.drafts} batch {self.requests} context {self.context}"


@dataclass(frozen=True, slots=True)
class DeviceConfig:
    """Where models live. `toy`: small shapes in float32, as the interpreter's bfloat16 products are wrong."""

    device: torch.device
    toy: bool

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.toy else torch.bfloat16

    def model_config(self, name: str) -> dict[str, Any]:
        return (TOYS if self.toy else SHAPES)[name]


def cells_of(models: list[str], batches: list[int], contexts: tuple[int, int], prompt: int = PROMPT_ROWS) -> list[Cell]:
    """In the order of models and batches. The second context is measured without drafts, at the smallest batch and at the largest one below
    128."""
    cells = []
    long_batches = {min(batches), max((size for size in batches if size < 128), default=min(batches))}
    for model in models:
        cells += [Cell(model, drafts, size, contexts[0]) for size in batches for drafts in DRAFTS]
        cells += [Cell(model, 0, size, contexts[1]) for size in batches if size in long_batches]
        cells.append(Cell(model, 0, min(max(batches), 8), 0, prompt))
    return cells


def arch_of(config: dict[str, Any]) -> ModelArch:
    """With one MTP layer, like a layer of the trunk where the family has none."""
    values = HFConfig(Path("config.json"), config)
    arch = family_of(values).arch(values, 1)
    if arch.mtp is not None:
        return arch
    return replace(arch, layers=(*arch.layers, arch.layers[-1]), mtp=MTPArch(1, "embedding-hidden", "post", "post"))


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def build(config: dict[str, Any], dtype: torch.dtype, positions: int, device: torch.device) -> DecoderModel:
    """Its weights are uninitialised, on `device`."""
    values, arch, kernels = HFConfig(Path("config.json"), config), arch_of(config), KERNELS.get("triton")()
    with default_dtype(dtype), device:
        return family_of(values).build(arch, Methods.all(Unquantized(kernels)), dtype, positions, kernels)


def random_model(config: dict[str, Any], dtype: torch.dtype, positions: int, device: torch.device) -> DecoderModel:
    model = build(config, dtype, positions, torch.device("meta")).to_empty(device=device)
    for module in model.modules():
        if isinstance(module, Rope):  # its tables are computed where there is memory
            with default_dtype(dtype):
                module.table = Rope(model.arch.rope, positions, dtype).table.to(device)
    fill(model, device)
    return model.eval()


def fake_model(config: dict[str, Any], dtype: torch.dtype, positions: int) -> DecoderModel:
    """Inside a FakeTensorMode."""
    model = build(config, dtype, positions, torch.device("cpu"))
    Finisher(model).rest()
    return model.eval()


def spec_of(drafts: int) -> SpecConfig:
    if not drafts:
        return SpecConfig(speculative_algorithm="none")
    return SpecConfig(speculative_algorithm="NEXTN", speculative_num_steps=drafts, speculative_adaptive=False)


def pages_of(cell: Cell, room: int = ROOM) -> int:
    """Of each request."""
    return -(-(cell.context + max(room, cell.prompt // cell.requests + room)) // PAGE)


def engine_of(model: DecoderModel, cell: Cell, device: torch.device, recorder: GraphCapturer, room: int = ROOM) -> Engine:
    """Nothing is captured yet."""
    requests, pages = cell.requests, pages_of(cell, room)
    sizes = EngineSizes(
        pages=[requests * pages] * len(page_groups(model.arch.layers)),
        page_size=PAGE,
        max_num_reqs=requests,
        context=pages * PAGE - 8 * (cell.drafts + 1),
    )
    options = EngineOptions(
        spec=spec_of(cell.drafts),
        scheduler=SchedulerConfig(chunked_prefill_size=2048),
        device=device,
        dtype=model.norm.weight.dtype,
        backend="triton",
        overlap=1,
        graphs=lambda step, sampling: StepGraphs(step, sampling, recorder, requests),
        fingerprint=None,
    )
    return assemble(model, sizes, options)


def runner_of(engine: Engine) -> tuple[Runner, StepGraphs]:
    runner = engine.runner
    assert isinstance(runner, Runner) and runner.graphs is not None
    return runner, runner.graphs


def prompts_of(cell: Cell) -> Prompts:
    """As many rows as fit into the graph: what pads it has one each."""
    padding = dict(PROMPTS)[cell.prompt] - cell.requests
    return Prompts([(cell.prompt - padding) // cell.requests] * cell.requests, [])


def sampling_of(engine: Engine) -> SamplingFeatures:
    return SamplingFeatures(all_greedy=True, any_greedy=True, all_coupled=runner_of(engine)[0].drafter.coupled)


def key_of(engine: Engine, cell: Cell) -> GraphKey:
    """Of the greedy step."""
    graphs, sampling = runner_of(engine)[1], sampling_of(engine)
    if not cell.prompt:
        return graphs.key(cell.requests, graphs.drafts, graphs.drafts, sampling, False)
    key = graphs.prompt_key(prompts_of(cell), 0, sampling)
    assert key is not None and key.rows == cell.prompt, cell
    return key


def replay(engine: Engine, cell: Cell) -> CapturedGraph:
    """One step of the requests that `seat` has put there; captured if it was not yet. Raises RuntimeError where that fails."""
    graphs, requests, prompts = runner_of(engine)[1], cell.requests, prompts_of(cell) if cell.prompt else None
    step_graph = graphs.replay(
        range(requests), [cell.drafts] * requests, [], cell.drafts, cell.drafts, sampling_of(engine), False, prompts=prompts
    )
    if step_graph is None:
        raise RuntimeError("the step cannot be captured")
    return step_graph


def seat(engine: Engine, cell: Cell) -> None:
    """Puts requests with `context` tokens into all seats, or prompts, with random tokens, keys and values."""
    runner, _ = runner_of(engine)
    req_tensors, requests, pages = runner.req_tensors, cell.requests, pages_of(cell)
    req_tensors.tokens.random_(1, runner.step.model.arch.vocab)
    length = prompts_of(cell).lengths[0] if cell.prompt else cell.context + 1
    computed, prompt = (0, length) if cell.prompt else (cell.context, min(8, cell.context))
    for row, value in enumerate((length, computed, prompt, pages * PAGE, cell.drafts)):
        req_tensors.counts[row, :requests] = value
    req_tensors.done[:requests] = False
    req_tensors.block_tables[0, :requests, :pages] = torch.arange(requests * pages, device=req_tensors.device).view(requests, pages)
    for store in runner.step.stores.stores:
        for part in store.pool.parts:
            part.normal_()


def traffic_of(engine: Engine, model: nn.Module, cell: Cell, rows: int) -> Traffic:
    runner, _ = runner_of(engine)
    moe = runner.step.model.arch.moe
    pools = {storage_of(part) for store in runner.step.stores.stores for part in store.pool.parts}
    return Traffic(
        requests=cell.requests,
        context=prompts_of(cell).lengths[0] if cell.prompt else cell.context,
        rows=rows,
        pools=frozenset(pools),
        weights=frozenset(storage_of(parameter) for parameter in model.parameters()),
        experts=0 if moe is None else moe.experts,
        top_k=0 if moe is None else moe.top_k,
    )


def state_of(engine: Engine) -> Callable[[], None]:
    """→ what puts the seats back to where they are now, by copies on the device, so that each replay does the same work."""
    req_tensors = runner_of(engine)[0].req_tensors
    tensors = req_tensors.tokens, req_tensors.counts, req_tensors.done, req_tensors.draft_sources
    snapshots: list[tuple[Tensor, Tensor]] = [(tensor, tensor.clone()) for tensor in tensors]

    def restore() -> None:
        for tensor, copy in snapshots:
            tensor.copy_(copy)

    return restore
