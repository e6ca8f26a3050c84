"""What matrix.py says of a compiled kernel, which it compiles again, and which it takes of many. Nothing is compiled."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.kernels import compiled, matrix
from tests.kernels.compiled import Facts, Source, Store, waits_before_stores

FINE = Facts(shared=1000, spilled=0, has_tf32=False, has_async_copy=True, waits_before_stores=True)
WAITS, STARTS, WRITES = "griddepcontrol.wait;", "griddepcontrol.launch_dependents;", "st.global.b32"


def source(dtype: str = "bf16", BM: int = 64, warps: int = 4, text: str = "a kernel's source") -> Source:
    kernel = SimpleNamespace(__name__="span_kernel", arg_names=["p_q", "p_k", "BM", "launch_pdl"], cache_key=text)
    signature = {"p_q": f"*{dtype}", "p_k": f"*{dtype}", "BM": "constexpr", "launch_pdl": "constexpr"}
    return Source(kernel, signature, {(2,): BM, (3,): True}, {(0,): [["tt.divisibility", 16]]}, {"num_warps": warps})


@pytest.mark.parametrize(
    ("facts", "error"),
    [
        (replace(FINE, shared=(227 << 10) + 1), "bytes of shared memory"),
        (replace(FINE, spilled=1), "spills 1"),
        (replace(FINE, has_tf32=True), "tf32"),
        (replace(FINE, has_async_copy=False), "not pipelined"),
        (replace(FINE, waits_before_stores=False), "does not wait"),
    ],
)
def test_what_is_wrong_with_a_kernel_is_said(facts: Facts, error: str) -> None:
    (found,) = matrix.errors(source(), facts, "sm_90")
    assert error in found


def test_what_is_allowed() -> None:
    """float32 may spill a little and need not be pipelined; a compiler may not say what it spills; AMD has no asynchronous copies."""
    assert not list(matrix.errors(source(), replace(FINE, shared=227 << 10), "sm_90"))
    assert not list(matrix.errors(source("fp32"), replace(FINE, spilled=64, has_async_copy=False), "sm_90"))
    assert list(matrix.errors(source("fp32"), replace(FINE, spilled=65), "sm_90")) == ["spills 65"]
    assert not list(matrix.errors(source(), replace(FINE, spilled=None), "sm_90"))
    assert not list(matrix.errors(source(), replace(FINE, has_async_copy=False), "gfx942"))


def test_a_kernel_that_is_launched_early_waits_first() -> None:
    assert waits_before_stores(WAITS + STARTS + WRITES)
    for ptx in (STARTS + WAITS + WRITES, WRITES + WAITS + STARTS, WAITS + WRITES + STARTS, 2 * WAITS + STARTS + WRITES, WRITES, ""):
        assert not waits_before_stores(ptx)


def test_what_changes_is_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A source, a type, a constant, an option, the chip, the environment, what is asked of the compiler."""
    others = [source(text="another"), source("fp16"), source(BM=32), source(warps=8)]
    digests = {source().digest("sm_90"), source().digest("sm_100"), *(other.digest("sm_90") for other in others)}
    assert len(digests) == 6 and source().digest("sm_90") in digests
    with monkeypatch.context() as patch:
        patch.setenv("TRITON_DEFAULT_FP_FUSION", "0")
        assert source().digest("sm_90") not in digests
    monkeypatch.setattr(compiled, "THIS_FILE", "other facts")
    assert source().digest("sm_90") not in digests


def test_facts_are_kept(tmp_path: Path) -> None:
    store = Store("a group", tmp_path / "matrix")
    assert store.load() == {}
    store.save({"one": FINE, "two": replace(FINE, spilled=None)})
    store.save({"two": replace(FINE, spilled=None)})
    assert Store("a group", tmp_path / "matrix").load() == {"two": replace(FINE, spilled=None)}
    assert len(list(store.path.parent.iterdir())) == 1


def test_which_configurations_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    sources = [source(dtype, BM, warps) for BM in (128, 64, 32) for dtype in ("bf16", "fp32") for warps in (4, 8)]
    monkeypatch.setattr(matrix, "launched", lambda target, group: sources)
    targets = ("sm_90", "gfx942")
    assert len(matrix.covered("group", targets, None)) == 24
    once, pairs = (matrix.covered("group", targets, strength) for strength in (1, 2))
    assert once[0] == ("sm_90", sources[0]) and len(once) < len(pairs) < 12

    def parts(target: str, one: Source) -> tuple[object, ...]:
        return target, one.signature["p_q"], one.constant("BM"), one.options["num_warps"]

    everything = [parts(target, one) for target in targets for one in sources]
    for i in range(4):
        assert {parts(*case)[i] for case in once} == {case[i] for case in everything}
        for j in range(i):
            assert {(parts(*case)[i], parts(*case)[j]) for case in pairs} == {(case[i], case[j]) for case in everything}


def test_the_size_of_a_tile() -> None:
    assert source(BM=64).tile == 64 and source(BM=1).tile == 1
