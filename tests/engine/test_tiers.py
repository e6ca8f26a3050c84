"""Pages below the device: found again, never wrong, given up rather than waited for. The fake runner moves them late and in any order."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from mtpserve.cache.keys import extend, root
from mtpserve.engine.startup.start import try_out
from tests import selection
from tests.engine.fake_runner import greedy_text
from tests.engine.harness import OUTPUT, VOCAB, Bench
from tests.engine.test_prefix_cache import SHARED, alone, computed, own


def push_out(bench: Bench, name: str, count: int = 3) -> None:
    """Requests that need the device's pages for themselves."""
    for number in range(count):
        alone(bench, f"{name} {number}", own(f"{name} {number}", 60), 4)


@pytest.mark.parametrize("overlap", [0, 2])
@pytest.mark.parametrize("windows", [(None,), (None, 6)])
@pytest.mark.parametrize("disk", [False, True])
def test_what_the_device_gave_away_comes_back(windows: tuple[int | None, ...], overlap: int, disk: bool) -> None:
    bench = Bench(windows=windows, pages=(40, *[40] * (len(windows) - 1)), host=200, disk=disk, overlap=overlap)
    alone(bench, "first", SHARED)
    push_out(bench, "other", 4)
    assert alone(bench, "second", SHARED) == 39
    assert computed(bench, "second") <= 1 + OUTPUT


def test_what_several_need_is_loaded_once() -> None:
    bench = Bench(pages=60, host=200, running=8)
    prompts = {str(i): [*SHARED, *own(str(i), 9)] for i in range(6)}
    for name, prompt in prompts.items():
        alone(bench, name, prompt, 4)
    push_out(bench, "other", 6)
    before = bench.engine.stats.loaded_pages.get("host", 0)
    for name, prompt in prompts.items():
        bench.add(f"{name} again", prompt, 4)
    late = set()
    while bench.engine.has_work:
        bench.step()
        late.add(bench.engine.stats.waiting_for_pages)
    assert max(late) > 1 and bench.engine.stats.waiting_for_pages == 0
    assert all(bench.texts[f"{name} again"] == bench.texts[name] for name in prompts)
    # Ten pages that they share, and two of each one's own.
    assert bench.engine.stats.loaded_pages["host"] - before <= 10 + 6 * 2


def test_without_tiers_it_does_not() -> None:
    bench = Bench(pages=40)
    alone(bench, "first", SHARED)
    push_out(bench, "other", 4)
    assert alone(bench, "second", SHARED) == 0


def test_the_disk_has_what_host_memory_gave_away_and_what_was_never_evicted() -> None:
    bench = Bench(pages=40, host=12, disk=True)
    alone(bench, "first", SHARED)
    push_out(bench, "other", 8)
    assert alone(bench, "second", SHARED) == 39
    # Another engine with the same folder: all that the first one ever completed is there.
    other = Bench(pages=40, host=12, disk=True)
    other.runner.disk.files.update(bench.runner.disk.files)
    assert alone(other, "third", SHARED) == 39
    assert other.engine.stats.loaded_pages == {"disk": 10}


def test_others_run_while_pages_are_loaded() -> None:
    bench = Bench(pages=60, host=200, budget=16, context=120)
    alone(bench, "first", SHARED)
    push_out(bench, "other", 6)
    bench.runner.patience = 10**6  # nothing ends before the device is idle
    bench.add("long", own("long", 20), 40)
    bench.step()
    bench.add("second", SHARED)
    bench.add("third", own("third", 6), 6)
    for _ in range(12):
        bench.step()
    assert len(bench.texts["long"]) > 12 and bench.texts["third"] and not bench.texts["second"]
    bench.drain()
    assert bench.texts["second"] == greedy_text(SHARED, OUTPUT, VOCAB)
    assert bench.last["second"].finish is not None and computed(bench, "second") <= 1 + OUTPUT


@pytest.mark.parametrize("damaged", [0, 4, 9])
def test_a_damaged_file_is_a_miss(damaged: int) -> None:
    bench = Bench(pages=40, host=12, disk=True)
    alone(bench, "first", SHARED)
    push_out(bench, "other", 8)
    keys: list[bytes] = []
    extend(keys, root(b""), SHARED, len(SHARED), 4)
    bench.runner.disk.damaged.add(keys[damaged])
    assert alone(bench, "second", SHARED) == damaged * 4
    assert bench.engine.stats.failed_transfers_total == {"fetch": 1}


def test_a_full_disk_costs_hits_and_nothing_else() -> None:
    bench = Bench(pages=40, host=12, disk=True)
    bench.runner.disk.full = True
    alone(bench, "first", SHARED)
    push_out(bench, "other", 8)
    assert alone(bench, "second", SHARED) == 0
    assert not bench.runner.disk.files


def test_who_is_aborted_while_its_pages_are_loaded_leaves_nothing_behind() -> None:
    bench = Bench(pages=40, host=200)
    alone(bench, "first", SHARED)
    push_out(bench, "other", 4)
    bench.runner.patience = 10**6
    bench.add("second", SHARED)
    bench.step()
    bench.engine.abort("second")
    bench.drain()
    assert alone(bench, "third", SHARED) == 39


def test_emptying_the_cache_empties_all_tiers() -> None:
    bench = Bench(pages=40, host=200, disk=True)
    alone(bench, "first", SHARED)
    push_out(bench, "other", 4)
    bench.runner.patience = 10**6
    bench.add("under way", SHARED)
    bench.step()
    bench.engine.reset_prefix_cache()
    bench.drain()
    assert bench.texts["under way"] == greedy_text(SHARED, OUTPUT, VOCAB)
    bench.engine.reset_prefix_cache()
    assert alone(bench, "second", SHARED) == 0


def test_a_salt_isolates_in_all_tiers() -> None:
    bench = Bench(pages=40, host=12, disk=True)
    alone(bench, "first", SHARED, salt="blue")
    push_out(bench, "other", 6)
    assert alone(bench, "second", SHARED) == 0
    assert alone(bench, "third", SHARED, salt="blue") == 39


@selection.examples(80)
@given(data=st.data())
@pytest.mark.parametrize("overlap", [0, 1, 2])
@pytest.mark.parametrize("windows", [(None,), (None, 6)])
def test_no_text_depends_on_the_tiers(data: st.DataObject, windows: tuple[int | None, ...], overlap: int) -> None:
    """Small pools, little host memory, transfers that take their time or fail."""
    pages = data.draw(st.integers(24, 50))
    bench = Bench(
        windows=windows, pages=(pages, *[pages] * (len(windows) - 1)), overlap=overlap, budget=data.draw(st.integers(8, 40)),
        drafts=data.draw(st.integers(0, 3)), policy=data.draw(st.sampled_from(["fcfs", "lpm"])), running=data.draw(st.integers(1, 5)),
        context=80, host=data.draw(st.integers(1, 60)), disk=data.draw(st.booleans()),
    )  # fmt: skip
    bench.runner.patience = data.draw(st.integers(0, 6))
    prompts: dict[str, tuple[list[int], int]] = {}
    heads = [SHARED[:20], own("head", 13), SHARED]
    aborted = set()
    for number in range(data.draw(st.integers(2, 20))):
        name = str(number)
        begin = data.draw(st.sampled_from([*heads, *(prompt for prompt, _ in prompts.values())]))
        prompts[name] = [*begin, *own(name, data.draw(st.integers(1, 8)))][:55], data.draw(st.integers(1, 12))
        bench.add(name, *prompts[name], salt=data.draw(st.sampled_from(["", "x"])))
        for _ in range(data.draw(st.integers(0, 6))):
            bench.step()
        match data.draw(st.integers(0, 12)):
            case 0:
                bench.engine.abort(name)
                aborted.add(name)
            case 1:
                bench.engine.reset_prefix_cache()
            case 2:
                bench.runner.disk.full = not bench.runner.disk.full
            case 3 if bench.runner.disk.files:
                bench.runner.disk.damaged.add(data.draw(st.sampled_from(sorted(key for _, key in bench.runner.disk.files))))
            case 4 if bench.runner.disk.files:
                bench.runner.disk.files.pop(data.draw(st.sampled_from(sorted(bench.runner.disk.files))))
    bench.drain()
    for name, (prompt, output) in prompts.items():
        text = greedy_text(prompt, output, VOCAB)
        assert bench.texts[name] == (text[: len(bench.texts[name])] if name in aborted else text)


@pytest.mark.parametrize("disk", [False, True])
def test_the_pages_of_a_failed_request_are_in_no_tier(disk: bool) -> None:
    """Preempted in the middle of its prompt, for example, it leaves pages that nobody has vouched for."""
    bench = Bench(pages=40, host=200, disk=disk, budget=16)
    alone(bench, "good", SHARED[:24], 4)
    push_out(bench, "other", 4)
    bench.runner.fail_ids.add("bad")
    bench.add("bad", SHARED)
    bench.drain()
    bench.runner.fail_ids.clear()
    push_out(bench, "another", 4)
    assert alone(bench, "next", SHARED) == 0
    assert alone(bench, "after it", SHARED) == 39


def test_only_what_a_token_was_sampled_after_is_written_through() -> None:
    bench = Bench(pages=40, host=200, disk=True, budget=8)
    bench.add("first", SHARED)
    for _ in range(4):
        bench.step()
    assert not bench.runner.disk.files
    bench.drain()
    assert len(bench.runner.disk.files) == (len(SHARED) + OUTPUT - 1) // 4


def test_a_trial_leaves_the_tiers_alone() -> None:
    bench = Bench(pages=40, host=12, disk=True)
    alone(bench, "first", SHARED)
    push_out(bench, "other", 4)
    files = dict(bench.runner.disk.files)
    try_out(bench.engine, compiles=True)
    assert files.items() <= bench.runner.disk.files.items()
    assert not any(set(content) == {0} for content in bench.runner.disk.files.values()), "a trial's own pages"
    assert alone(bench, "second", SHARED) == 39
