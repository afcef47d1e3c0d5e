"""The claim on a metadata directory: a second cluster is refused exactly while the first one lives."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from spark_broker.driver import metadata_claim
from spark_broker.driver.metadata_claim import (
    CLAIM,
    Claim,
    ClaimKeeper,
    Owner,
    check_claim,
    end_claim,
    end_claim_of,
    read_claim,
)
from spark_broker.driver.metadata_store import LocalStore
from spark_broker.errors import ClusterInUseError
from tests.support.waiting import eventually

BEAT_S = 0.02
WATCH_S = 0.5


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(str(tmp_path / "metadata"))


@pytest.fixture
def driver() -> Iterator[subprocess.Popen[bytes]]:
    """The process of another driver."""
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def me(run: str = "mine") -> Owner:
    return Owner.here(run, os.getpid())


def claimed(store: LocalStore, owner: Owner, **values: object) -> None:
    claim = msgspec.structs.replace(Claim(owner), **values)
    store.put(CLAIM, msgspec.json.encode(claim))


def test_an_unclaimed_directory_is_free(store: LocalStore) -> None:
    check_claim(store, me())


def test_a_claim_of_a_process_that_lives_keeps_others_out_and_says_who(
    store: LocalStore, driver: subprocess.Popen[bytes]
) -> None:
    owner = Owner.here("theirs", driver.pid)
    claimed(store, owner)

    with pytest.raises(ClusterInUseError, match=rf"in use by pid {driver.pid} on host .* since .*; stop it first"):
        check_claim(store, me())


def test_a_claim_of_a_process_that_has_ended_keeps_nobody_out(
    store: LocalStore, driver: subprocess.Popen[bytes]
) -> None:
    claimed(store, Owner.here("theirs", driver.pid))
    driver.kill()
    driver.wait(20)

    check_claim(store, me())


def test_a_pid_that_was_used_again_keeps_nobody_out(store: LocalStore, driver: subprocess.Popen[bytes]) -> None:
    owner = Owner.here("theirs", driver.pid)
    claimed(store, msgspec.structs.replace(owner, start_time=owner.start_time - 1))

    check_claim(store, me())


def test_the_same_run_may_start_its_controller_again(store: LocalStore) -> None:
    claimed(store, me())

    check_claim(store, me())


def test_another_cluster_of_the_same_process_is_kept_out(store: LocalStore) -> None:
    claimed(store, me("first"))

    with pytest.raises(ClusterInUseError):
        check_claim(store, me("second"))


def test_a_claim_that_was_given_up_keeps_nobody_out(store: LocalStore) -> None:
    keeper = ClaimKeeper(store, me("first"), beat_s=BEAT_S)
    keeper.take()
    keeper.end()

    check_claim(store, me("second"))


@pytest.mark.parametrize("elsewhere", [{"boot_id": "another machine"}, {"pid_namespace": "another container"}])
def test_of_another_machine_or_container_beats_tell_that_it_lives(store: LocalStore, elsewhere: dict[str, str]) -> None:
    """Its pid means nothing here, although a process of this machine has the same one."""
    keeper = ClaimKeeper(store, msgspec.structs.replace(me("theirs"), **elsewhere), beat_s=BEAT_S)
    keeper.take()
    with pytest.raises(ClusterInUseError):
        check_claim(store, me(), watch_s=20.0)
    keeper._ended.set()  # as if that machine were gone
    keeper.join(20)

    check_claim(store, me(), watch_s=WATCH_S)


def test_a_claim_rises_while_its_owner_lives(store: LocalStore) -> None:
    keeper = ClaimKeeper(store, me(), beat_s=BEAT_S)
    keeper.take()

    eventually(lambda: beats(store) > 2, 20, "beats")

    keeper.end()
    assert read_claim(store) == Claim(me_as_claimed(store), beats(store), ended=True)


def beats(store: LocalStore) -> int:
    claim = read_claim(store)
    return -1 if claim is None else claim.beat


def me_as_claimed(store: LocalStore) -> Owner:
    claim = read_claim(store)
    assert claim is not None
    return claim.owner


def test_a_deposed_owner_does_not_write_over_the_claim_of_the_next(store: LocalStore) -> None:
    keeper = ClaimKeeper(store, me("old"), beat_s=BEAT_S)
    keeper.take()
    claimed(store, me("new"))
    for _ in range(10):
        keeper._beat()
    keeper.end()
    keeper.join(20)

    assert not keeper.is_alive()
    assert read_claim(store) == Claim(me_as_claimed(store))
    assert me_as_claimed(store).run == "new"


def test_a_beat_that_crosses_a_take_over_leaves_the_living_cluster_its_claim(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Story: the old controller had read its own claim, the new one claimed, the old one wrote, and then it ended. The
    next cluster was let in, and deposed the one that ran.
    """
    old, new = (ClaimKeeper(store, me(run), beat_s=3600) for run in ("old", "new"))
    old.take()
    read = metadata_claim.read_claim

    def crossed(of: LocalStore) -> Claim | None:
        claim = read(of)
        monkeypatch.setattr(metadata_claim, "read_claim", read)
        new.take()
        return claim

    monkeypatch.setattr(metadata_claim, "read_claim", crossed)
    old._beat()
    assert me_as_claimed(store).run == "old"
    new._beat()
    assert me_as_claimed(store).run == "old", "it lives, as far as anybody knows"
    old.end()
    new._beat()
    with pytest.raises(ClusterInUseError):
        check_claim(store, me("third"))
    new.end()
    check_claim(store, me("third"))


def test_a_claim_of_another_owner_that_does_not_beat_any_more_is_taken_again(store: LocalStore) -> None:
    """Of two that started at the same time, one claimed last, failed, and was killed."""
    keeper = ClaimKeeper(store, me("mine"), beat_s=BEAT_S, watch_s=WATCH_S)
    keeper.take()
    claimed(store, me("killed"))
    eventually(lambda: me_as_claimed(store).run == "mine", 20, "its owner takes it again")
    keeper.end()


def test_only_the_owner_gives_its_claim_up(store: LocalStore) -> None:
    claimed(store, me("theirs"))

    end_claim(store, "mine")

    with pytest.raises(ClusterInUseError):
        check_claim(store, me("mine"))


def test_what_is_no_claim_keeps_nobody_out(store: LocalStore) -> None:
    store.put(CLAIM, b"{")

    check_claim(store, me())


def test_a_store_that_fails_is_no_reason_to_fail_at_the_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()

    end_claim_of(str(tmp_path / "file" / "metadata"), "mine")

    assert "still counts as in use" in caplog.text


def test_a_claim_that_cannot_be_renewed_is_renewed_later(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    keeper = ClaimKeeper(store, me(), beat_s=BEAT_S)
    keeper.take()

    def failing(name: str, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(store, "put", failing)
        eventually(lambda: "was not renewed" in caplog.text, 20, "a line about it")
    before = beats(store)

    eventually(lambda: beats(store) > before, 20, "the next beat")
    keeper.end()


def test_what_the_driver_makes_is_as_private_as_what_the_controller_makes(tmp_path: Path) -> None:
    """Story: pieces of the reserve were made under the user's umask, and became metadata when the disk was full."""
    before = os.umask(0o022)
    try:
        store = LocalStore(str(tmp_path / "metadata"))
        store.create("a", b"x")
        store.put("b", b"x")
    finally:
        os.umask(before)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "metadata").iterdir()}
    assert modes == {0o600}
    assert stat.S_IMODE((tmp_path / "metadata").stat().st_mode) == 0o700
