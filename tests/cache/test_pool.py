"""Keys and values in another type than the layers compute in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mtpserve.cache.pool import KVPool, store
from mtpserve.cache.stores import Stores
from mtpserve.config import CacheConfig, EngineConfig, ModelConfig
from mtpserve.core.arch.model import Attention, Compressed, KVLayout, Selected, page_groups, tokens_of_entries
from mtpserve.engine.startup import assemble, build
from tests.models.compressed_checkpoints import deepseek_v4
from tests.models.sparse_checkpoints import deepseek_v32

FP8 = torch.float8_e4m3fn
GQA, LATENT = KVLayout("gqa", 2, 8, 8), KVLayout("mla", 1, 24, 16)


def pool(layout: KVLayout, stored: torch.dtype = FP8) -> KVPool:
    return KVPool(layout, 2, 3, 4, torch.float32, torch.device("cpu"), poison=True, kv_dtype=stored)


def rows(layout: KVLayout, count: int) -> tuple[Tensor, Tensor | None]:
    torch.manual_seed(0)
    k = torch.randn(count, layout.heads, layout.key_dim)
    return k, torch.randn(count, layout.heads, layout.value_dim) if layout.kind == "gqa" else None


def put(pool: KVPool, layer: int, slots: Tensor, k: Tensor, v: Tensor | None) -> None:
    store(pool.keys(layer), slots, k)
    if v is not None:
        store(pool.values(layer), slots, v)


@pytest.mark.parametrize("layout", [GQA, LATENT], ids=["gqa", "latent"])
@pytest.mark.parametrize("stored", [FP8, torch.bfloat16], ids=str)
def test_what_is_stored_comes_back_rounded(layout: KVLayout, stored: torch.dtype) -> None:
    made, slots, (k, v) = pool(layout, stored), torch.tensor([7, 0, 11]), rows(layout, 3)
    put(made, 1, slots, k, v)
    values = k[..., : layout.value_dim] if v is None else v
    for part, wanted in ((made.keys(1), k), (made.values(1), values)):
        assert part.dtype == stored and torch.equal(made.widened(part[slots]), wanted.to(stored).float())
        untouched = [slot for slot in range(12) if slot not in slots]
        assert made.widened(part[untouched]).isnan().all() and made.widened(made.keys(0)).isnan().all()
    for some in (slots, slots[:, None], slice(0, 12)):
        for found, part in zip(made.gathered(1, some), (made.keys(1), made.values(1)), strict=True):
            assert torch.equal(found.nan_to_num(), made.widened(part[some]).nan_to_num())


def test_large_numbers_are_cut_off_and_nan_stays() -> None:
    made = pool(LATENT)
    k = torch.zeros(1, 1, 24)
    k[0, 0, :5] = torch.tensor([449.0, 1e9, -torch.inf, torch.nan, -464.0])
    put(made, 0, torch.tensor([2]), k, None)
    found = made.widened(made.keys(0)[2, 0, :5])
    assert found[[0, 1, 2, 4]].tolist() == [448, 448, -448, -448] and found[3].isnan()


@pytest.mark.parametrize("layout", [GQA, LATENT], ids=["gqa", "latent"])
def test_slots_move(layout: KVLayout) -> None:
    made, (k, v) = pool(layout), rows(layout, 4)
    for layer in range(2):
        put(made, layer, torch.arange(4), k * (layer + 1), None if v is None else v * (layer + 1))
    made.move(torch.tensor([[2, 3]]), torch.tensor([[1, 2]]))
    for layer in range(2):
        wanted = (k * (layer + 1)).to(FP8).float()
        assert torch.equal(made.widened(made.keys(layer)[:4]), wanted[[0, 2, 3, 3]])


@pytest.mark.parametrize("make", [None, deepseek_v32, deepseek_v4], ids=["demo", "deepseek v3.2", "deepseek v4"])
def test_the_plan_and_the_stores_agree(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, make: Callable[[Path], object] | None) -> None:
    model: dict[str, str] = {}
    sizes, made = {}, []
    if make is not None:
        make(tmp_path)
        model = {"model": str(tmp_path)}

    class Kept(Stores):
        def __init__(self, *given: Any, **options: Any) -> None:
            super().__init__(*given, **options)
            made.append(self.nbytes)

    monkeypatch.setattr(assemble, "Stores", Kept)
    for dtype in ("auto", "bfloat16", "fp8", "fp8_e4m3"):
        config = EngineConfig(
            model=ModelConfig(dtype="float32", device="cpu", **model), cache=CacheConfig(max_total_tokens=256, kv_cache_dtype=dtype)
        )
        sizes[dtype] = sum(size for what, size in build.plan_engine(config).memory.rows if "KV" in what or "entries" in what)
        build.build_engine(config)
        assert made[-1] == sizes[dtype]
    assert sizes["auto"] > sizes["bfloat16"] > sizes["fp8"] == sizes["fp8_e4m3"]
    if make is None:  # else there are scales, and numbers that are not rounded
        assert sizes["auto"] == 2 * sizes["bfloat16"] == 4 * sizes["fp8"]


def test_index_keys_are_stored_beside_the_keys() -> None:
    """They move with the keys, are counted, and are the layers' own that have them."""
    own, other = (Attention(LATENT, selected=Selected(5, dim)) for dim in (12, 0))
    assert (own.numbers, other.numbers) == (LATENT.numbers + 12, LATENT.numbers)
    assert (str(own), str(other)) == ("latent, 24, index key 12, best 5", "latent, 24, best 5")
    stores = Stores([own, other, own], (3,), 4, torch.float32, torch.device("cpu"), poison=True)
    assert stores.nbytes == 4 * 12 * (2 * own.numbers + other.numbers)
    pool = stores.stores[0].pool
    for layer in range(2):
        pool.index_keys(layer).store(torch.arange(4), torch.full((4, 1, 12), layer + 1.0).cumsum(0))
    stores.move(0, torch.tensor([[2, 3]]), torch.tensor([[1, 2]]))
    for layer in range(2):
        assert (pool.index_keys(layer).rows[:4, 0, 0] / (layer + 1)).tolist() == [1, 3, 4, 4]
    assert pool.index_keys(0).rows[4:].isnan().all() and stores.stores[1].pool.index is None
    stores.clear_last()
    assert not pool.index_keys(1).rows[8:].any()


def test_index_keys_in_float8_have_a_scale_each() -> None:
    """Keys of any size keep 4 bits of each number, NaN is not lost; scales move with their keys, and are counted."""
    kind = Attention(LATENT, selected=Selected(5, 12))
    stores = Stores([kind] * 2, (3,), 4, torch.float32, torch.device("cpu"), poison=True, kv_dtype=torch.float8_e4m3fn)
    assert stores.nbytes == 2 * 12 * (kind.numbers + 4)
    keys = torch.randn(10, 1, 12, generator=torch.Generator().manual_seed(0))
    keys *= torch.tensor([1, 448, 449, 1e-6, 1e-30, 1e30, 1e38, 2**-9, 0, torch.nan]).view(-1, 1, 1)
    pool = stores.stores[0].pool
    for layer in range(2):
        pool.index_keys(layer).store(torch.arange(10), keys)
    stores.move(0, torch.tensor([[7]]), torch.tensor([[0]]))
    for found in map(pool.index_keys, range(2)):
        assert found.scales is not None and (found.scales[:9].frexp().mantissa == 0.5).all(), "powers of two"
        there, wanted = found.at(torch.arange(12)), torch.cat([keys[7:8, 0], keys[1:9, 0]])
        rounded = 2**-4 * wanted.abs() + 2**-10 * found.scales[:9, 0]
        assert ((there[:9] - wanted).abs() <= rounded).all() and (found.rows[:8].float().abs().amax((1, 2)) > 200).all()
        assert there[9:].isnan().all()


def test_layers_of_one_kind_share_a_store() -> None:
    full, window, latent = Attention(GQA), Attention(GQA, 8), Attention(LATENT)
    layers = [full, window, full, latent, window, full]
    stores = Stores(layers, (2, 3), 4, torch.float32, torch.device("cpu"), poison=True)
    assert [(store.kind, store.group) for store in stores.stores] == [(full, 0), (window, 1), (latent, 0)]
    assert [len(store.pool.k) for store in stores.stores] == [3, 2, 1] and stores.groups == [0, 1]
    assert stores.places == [(0, 0), (1, 0), (0, 1), (2, 0), (1, 1), (0, 2)]
    assert stores.nbytes == 4 * 4 * (2 * (3 * GQA.numbers + LATENT.numbers) + 3 * 2 * GQA.numbers)
    rest = stores.select_layers(slice(3, None))  # latent, window, full
    assert [store.kind for store in rest.stores] == [full, window, latent] and rest.places == [(2, 0), (1, 1), (0, 2)]
    assert stores.select_layers(slice(2, 3)).stores == [stores.stores[0]] and stores.select_layers(slice(2, 3)).places == [(0, 1)]
    stores.clear_last()
    for kind, pool, *_ in stores.stores:
        last = 8 if kind is window else 4
        assert pool.k[:, :last].isnan().all() and not pool.k[:, last:].any()
        pool.k[:, 5] = 7.0
    stores.move(0, torch.tensor([[5]]), torch.tensor([[0]]))
    assert [bool((store.pool.k[:, 0] == 7.0).all()) for store in stores.stores] == [True, False, True]


def test_entries_are_in_the_pages_of_full_attention() -> None:
    """Pages of 4 tokens have 2 entries, and the last page is the one that pads; 2 seats with 3 nodes each have places beyond them."""
    kind = Attention(LATENT, 3, compressed=Compressed(2, overlap=True, selected=Selected(1, 6)))
    stores = Stores([kind, kind], (3, 2), 4, torch.float32, torch.device("cpu"), poison=True, kv_dtype=torch.bfloat16, nodes=(2, 3))
    assert page_groups([kind]) == (None, 4) and stores.groups == [0, 1] and tokens_of_entries([kind, kind]) == 2
    [one] = stores.stores
    assert one.entries is not None and one.pool.inputs is not None and one.entries.index is not None
    # Of both series of an entry and its index key, a value and a gate; they are not rounded.
    assert one.pool.inputs.shape == (2, 8, 1, 4 * (LATENT.key_dim + 6)) and one.pool.inputs.dtype == torch.float32
    assert one.entries.k.shape == (2, 3 * 2 + 2 * 3, 1, LATENT.key_dim) and one.entries.k.dtype == torch.bfloat16
    assert [part.shape[1] for part in one.entries.by_page] == [3, 3] and one.entries.by_page[1].shape[2] == 2 * 6 * 2
    stores.clear_last()
    assert not one.entries.k[:, 4:6].any() and one.entries.k[:, 6:].isnan().all() and not one.pool.k[:, 4:].any()
    # Seat 1: node 2 becomes token 5 in slot 9 and has completed an entry, node 3 becomes token 6.
    for node in (1, 2, 3):
        one.entries.k[:, one.of_node(1, node)] = float(node)
    req_indices, nodes, index = torch.tensor([1]), torch.tensor([[2, 3]]), torch.tensor([[5, 6]])
    stores.move_entries(req_indices, nodes, index, torch.tensor([[9, 10]]), torch.tensor([[True, True]]))
    assert (one.entries.k[:, 4] == 2).all() and not one.entries.k[:, 5].any() and one.entries.k[:, :4].isnan().all()
    stores.move_entries(req_indices, nodes, index, torch.tensor([[1, 2]]), torch.tensor([[False, False]]))
    assert one.entries.k[:, :4].isnan().all()
