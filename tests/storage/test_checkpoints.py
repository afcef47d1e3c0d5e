"""Small files that are replaced whole."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from spark_broker.errors import DamagedLogError
from spark_broker.storage.checkpoints import LEADER_EPOCHS_FILE, read_leader_epochs, write_leader_epochs


def test_leader_epochs_are_read_back_in_order(tmp_path: Path) -> None:
    assert read_leader_epochs(tmp_path) == []
    write_leader_epochs(tmp_path, [(0, 0), (3, 17)])
    assert read_leader_epochs(tmp_path) == [(0, 0), (3, 17)]


def test_a_write_that_dies_before_the_rename_leaves_the_old_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_leader_epochs(tmp_path, [(1, 2)])

    def rename(source: Path, target: Path) -> None:
        raise OSError("power cut")

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", rename)
        with pytest.raises(OSError, match="power cut"):
            write_leader_epochs(tmp_path, [(3, 4)])
    assert read_leader_epochs(tmp_path) == [(1, 2)]


def test_a_file_that_is_larger_than_any_memory_is_damaged(tmp_path: Path) -> None:
    write_leader_epochs(tmp_path, [(1, 2)])
    os.truncate(tmp_path / LEADER_EPOCHS_FILE, 1 << 43)
    with pytest.raises(DamagedLogError, match=r"leader-epochs\.json has 8,796,093,022,208 bytes"):
        read_leader_epochs(tmp_path)


def test_every_flipped_byte_is_noticed(tmp_path: Path) -> None:
    write_leader_epochs(tmp_path, [(1, 2)])
    path = tmp_path / LEADER_EPOCHS_FILE
    data = path.read_bytes()
    for at in range(len(data) - 1):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(DamagedLogError):
            read_leader_epochs(tmp_path)
