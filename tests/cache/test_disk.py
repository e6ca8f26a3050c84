"""Pages in files: what was written comes back, or nothing does."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from mtpserve.cache.disk import HEADER, DiskPages
from mtpserve.core.errors import ConfigError

MODEL, OTHER = b"m" * 16, b"o" * 16
SIZE = 1000
LIMIT = 100 * SIZE


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def content(number: int) -> bytearray:
    return bytearray((number + i) % 256 for i in range(SIZE))


def read(disk: DiskPages, number: int, group: int = 0) -> bytearray | None:
    page = bytearray(SIZE)
    return page if disk.read(group, key(number), memoryview(page)) else None


def file_of(disk: DiskPages, number: int) -> Path:
    return Path(disk.path(0, key(number)))


@pytest.fixture
def disk(tmp_path: Path) -> DiskPages:
    disk = DiskPages(str(tmp_path), LIMIT, MODEL)
    assert disk.write(0, key(1), memoryview(content(1)))
    return disk


def test_what_was_written_comes_back(disk: DiskPages, tmp_path: Path) -> None:
    assert disk.has(0, key(1)) and read(disk, 1) == content(1)
    assert not disk.has(0, key(2)) and read(disk, 2) is None
    assert not disk.has(1, key(1)), "another group's page is another page"
    again = DiskPages(str(tmp_path), LIMIT, MODEL)
    assert again.has(0, key(1)) and read(again, 1) == content(1), "it outlives the process"
    other = DiskPages(str(tmp_path), LIMIT, OTHER)
    assert not other.has(0, key(1)), "and is no other model's"


@pytest.mark.parametrize("at", [0, 20, 40, 52, 60, HEADER.size, HEADER.size + 500, HEADER.size + SIZE - 1])
@pytest.mark.parametrize("bit", [0, 7])
def test_a_flipped_bit_is_a_miss(disk: DiskPages, at: int, bit: int) -> None:
    file = file_of(disk, 1)
    damaged = bytearray(file.read_bytes())
    damaged[at] ^= 1 << bit
    file.write_bytes(damaged)
    assert read(disk, 1) is None
    assert not disk.has(0, key(1)), "it is not asked again"
    assert disk.write(0, key(1), memoryview(content(1))) and read(disk, 1) == content(1)


@pytest.mark.parametrize("length", [0, 10, HEADER.size, HEADER.size + 1, HEADER.size + SIZE - 1])
def test_a_file_that_was_cut_off_is_a_miss(disk: DiskPages, length: int) -> None:
    os.truncate(file_of(disk, 1), length)
    assert read(disk, 1) is None


def test_a_foreign_file_is_a_miss(disk: DiskPages) -> None:
    wrong = file_of(disk, 2)
    wrong.parent.mkdir(exist_ok=True)
    wrong.write_bytes(file_of(disk, 1).read_bytes())
    assert read(disk, 2) is None, "a good file under another's name"
    file_of(disk, 3).write_text("notes")
    assert read(disk, 3) is None
    file_of(disk, 4).mkdir()
    assert read(disk, 4) is None
    assert not disk.write(0, key(4), memoryview(content(4)))


def test_a_page_of_another_size_is_a_miss(disk: DiskPages) -> None:
    assert not disk.read(0, key(1), memoryview(bytearray(SIZE + 1)))


def test_the_least_recently_used_files_go_first(tmp_path: Path) -> None:
    disk = DiskPages(str(tmp_path), LIMIT, MODEL)
    for number in range(300):
        assert disk.write(0, key(number), memoryview(content(number)))
        os.utime(file_of(disk, number), (number, number))
        if number > 0:
            assert read(disk, 0) == content(0), "what is read is used"
            os.utime(file_of(disk, 0), (number, number))
    there = [number for number in range(300) if disk.has(0, key(number))]
    assert 60 < len(there) <= 100 and there[-1] == 299 and there[1:] == list(range(there[1], 300))


def test_engines_with_one_folder_keep_its_bound(tmp_path: Path) -> None:
    disks = [DiskPages(str(tmp_path), LIMIT, model) for model in (MODEL, MODEL, OTHER)]
    for number in range(200):
        for disk in disks:
            assert disk.write(0, key(number), memoryview(content(number)))
    total = sum(file.stat().st_size for file in tmp_path.rglob("*.kv"))
    assert total <= 1.2 * LIMIT
    assert not list(tmp_path.rglob("*.tmp"))


def test_foreign_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "photos" / "ab").mkdir(parents=True)
    (tmp_path / "photos" / "ab" / "1.jpg").write_bytes(bytes(3 * LIMIT))
    (tmp_path / "photos" / "ab" / "1.tmp").write_bytes(bytes(3 * LIMIT))
    disk = DiskPages(str(tmp_path), LIMIT, MODEL)
    for number in range(200):
        disk.write(0, key(number), memoryview(content(number)))
    disk.clear()
    assert (tmp_path / "notes.txt").read_text() == "mine" and (tmp_path / "photos" / "ab" / "1.jpg").stat().st_size == 3 * LIMIT
    assert (tmp_path / "photos" / "ab" / "1.tmp").exists()


def test_an_empty_cache_finds_nothing(disk: DiskPages) -> None:
    disk.clear()
    assert not disk.has(0, key(1)) and read(disk, 1) is None
    assert disk.write(0, key(1), memoryview(content(1))) and read(disk, 1) == content(1)


def test_a_clock_that_was_set_back_costs_no_page(disk: DiskPages) -> None:
    os.utime(file_of(disk, 1), (0, 0))
    assert read(disk, 1) == content(1)
    os.utime(file_of(disk, 1), (2**33, 2**33))
    assert read(disk, 1) == content(1)


def test_several_threads_at_once(disk: DiskPages) -> None:
    wrong = []

    def work(number: int) -> None:
        for turn in range(60):
            disk.write(0, key(turn % 7), memoryview(content(turn % 7)))
            found = read(disk, (turn + number) % 7)
            if found is not None and found != content((turn + number) % 7):
                wrong.append(turn)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_full_disk_is_told_once(disk: DiskPages, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert not disk.write(0, key(2), memoryview(content(2))) and not disk.write(0, key(3), memoryview(content(3)))
    assert caplog.text.count("No space left on device") == 1
    assert not list(disk.root.rglob("*.tmp")), "what was begun is removed"


def test_a_folder_that_cannot_be_used(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ConfigError, match=r"--kv-offload-dir .*file: (Not a directory|File exists)"):
        DiskPages(str(file), LIMIT, MODEL)


def test_a_read_error_is_a_miss(disk: DiskPages, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object) -> int:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "readv", broken)
        assert read(disk, 1) is None
    assert not disk.has(0, key(1))
