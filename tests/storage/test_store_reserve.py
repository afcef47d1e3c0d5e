"""The local store goes on for a while on a full disk, from room that it kept."""

from __future__ import annotations

import errno
import itertools
import os
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from spark_broker.driver.metadata_store import LocalStore
from spark_broker.driver.store_reserve import PIECE_BYTES, PIECES, RESERVE_PREFIX, Reserve
from tests.support.meanwhile import meanwhile
from tests.support.small_disk import fill_disk, small_disk

DATA = b"a record " * 30
LOOKS = 2000


@pytest.fixture(params=["tmpfs", "ext4"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", 8, request.param) as mounted:
        yield mounted


def opened(disk: Path) -> LocalStore:
    """A store that has its reserve."""
    store = LocalStore(str(disk / "metadata"))
    store.create("first", DATA)
    return store


def pieces(disk: Path) -> int:
    return len(list((disk / "metadata").glob(RESERVE_PREFIX + "*")))


def create_all(store: LocalStore, count: int) -> None:
    for number in range(count):
        assert store.create(f"{number}.log", DATA + bytes([number]))


def test_it_creates_files_on_a_full_disk_and_has_its_reserve_again_after_it(
    disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = opened(disk)
    filler = fill_disk(disk)
    create_all(store, PIECES // 2)
    assert not store.create("0.log", b"another writer's")
    assert [store.read(f"{number}.log") for number in range(PIECES // 2)] == [
        DATA + bytes([number]) for number in range(PIECES // 2)
    ]
    filler.unlink()
    store.create("with room", DATA)
    assert pieces(disk) == PIECES
    full, again = caplog.messages
    assert "is on a full disk. Its reserve takes 128 more files" in full
    assert "has room and its whole reserve again" in again


def test_a_restart_on_a_full_disk_finds_the_reserve(disk: Path) -> None:
    opened(disk)
    fill_disk(disk)
    create_all(LocalStore(str(disk / "metadata")), PIECES // 2)


def test_who_fills_the_disk_gets_nothing_of_it(disk: Path) -> None:
    """A thread writes whatever there is room for, without a pause."""
    store = opened(disk)
    filler = fill_disk(disk)

    def grab(ended: threading.Event) -> None:
        with filler.open("ab", buffering=0) as file:
            while not ended.is_set():
                with suppress(OSError):
                    file.write(bytes(4096))

    with meanwhile(grab, 20):
        create_all(store, PIECES // 2)


def test_a_file_that_is_put_again_and_again_does_not_use_it_up(disk: Path) -> None:
    store = opened(disk)
    store.put("claim", b"0")
    fill_disk(disk)
    for beat in range(3 * PIECES):
        store.put("claim", b"%d" % beat)
        assert store.read("claim") == b"%d" % beat
    create_all(store, PIECES // 2)


@pytest.mark.parametrize("disk", ["tmpfs", pytest.param("ext4", marks=pytest.mark.full)], indirect=True)
def test_a_file_that_could_not_be_put_is_not_written_over(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blocks go to the reserve only with its name: until then, the file is in use."""

    def broken(source: str, target: str) -> None:
        raise OSError(errno.EIO, "Input/output error", source, None, target)

    store = opened(disk)
    store.put("claim", b"ours")
    fill_disk(disk)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", broken)
        with pytest.raises(OSError, match="Input/output error"):
            store.put("claim", b"newer")
    for number in itertools.count():
        try:
            store.create(f"{number}.log", DATA)
        except OSError:
            break
    assert number > PIECES // 2
    assert store.read("claim") == b"ours"


def test_two_stores_share_it(disk: Path) -> None:
    stores = [opened(disk), opened(disk)]
    fill_disk(disk)
    names = [f"{number}.log" for number in range(PIECES // 4)]

    def created(store: LocalStore, data: bytes) -> set[str]:
        return {name for name in names if store.create(name, data)}

    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(created, store, b"%d" % at) for at, store in enumerate(stores)]
        ours = [run.result(20) for run in runs]
    assert ours[0].isdisjoint(ours[1])
    assert ours[0] | ours[1] == set(names)
    assert {name: stores[0].read(name) for name in names} == {name: b"%d" % (name in ours[1]) for name in names}


@pytest.mark.slow
def test_a_piece_has_its_name_only_when_it_is_whole(tmp_path: Path) -> None:
    """Story: one controller took a piece that another one still wrote, and found zeros in its record."""

    def make(ended: threading.Event) -> None:
        while not ended.is_set():
            reserve = Reserve(str(tmp_path))
            reserve.fill()
            while reserve.delete_one():
                pass

    def sizes() -> Iterator[int]:
        for piece in tmp_path.glob(RESERVE_PREFIX + "*"):
            with suppress(FileNotFoundError):
                yield piece.stat().st_size

    with meanwhile(make, 20):
        seen = Counter(size for _ in range(LOOKS) for size in sizes())
    assert seen.keys() == {PIECE_BYTES}


def test_what_it_has_no_room_for_is_refused_and_leaves_no_trace(disk: Path) -> None:
    store = opened(disk)
    fill_disk(disk)
    with pytest.raises(OSError, match="No space left"):
        store.create("large", bytes(PIECE_BYTES + 1))
    assert store.names() == ["first"]
    assert pieces(disk) == PIECES


def test_it_does_not_show_among_the_stores_files(tmp_path: Path) -> None:
    store = opened(tmp_path)
    assert pieces(tmp_path) == PIECES
    assert store.names() == ["first"]
