"""The index in memory: the entries that a reader holds never change."""

from __future__ import annotations

from spark_broker.storage.index import EntryIndex, headers_of, pack_entries
from tests.storage.logs import make_frame


def test_a_snapshot_keeps_its_entries_while_the_index_grows_is_cut_and_grows_again() -> None:
    old = [make_frame(3 * i, leader_epoch=0).header for i in range(20)]
    new = [make_frame(3 * i, leader_epoch=1).header for i in range(1, 20)]
    index = EntryIndex.empty()
    index.extend(pack_entries(old[:3], 100))
    early = index.entries
    index.extend(pack_entries(old[3:], 100 + 3 * old[0].length))
    snapshot = index.entries
    cut = index.prefix(1)
    cut.extend(pack_entries(new, 100 + old[0].length))
    assert headers_of(early) == old[:3]
    assert headers_of(snapshot) == old
    assert headers_of(cut.entries) == [old[0], *new]
