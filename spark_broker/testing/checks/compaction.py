"""Which values compaction may have removed: those of a key that was written again, tombstones, and what was aborted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from spark_broker.model import TopicPartition
from spark_broker.testing.history import Invoked

PartitionKey = tuple[TopicPartition, bytes]


def removable_values(
    invoked: Iterable[Invoked],
    base_offsets: Mapping[int, int],
    aborted: Iterable[int],
    read: Mapping[bytes, int],
) -> set[bytes]:
    """Values of keyed appends that need not be there.

    `base_offsets`: of acknowledged operations. `aborted`: operations that were not committed, or may not have been:
    they supersede nothing. `read`: the offsets of all committed values that were read.
    """
    keyed = {operation.operation: operation for operation in invoked if operation.keys}
    if not keyed:
        return set()
    uncertain = set(aborted)
    offsets = dict(read)
    for number, base_offset in base_offsets.items():
        if number in keyed and number not in uncertain:
            offsets.update({value: base_offset + at for at, value in enumerate(keyed[number].values)})
    newest: dict[PartitionKey, int] = {}
    for _, key, value, _ in _records(keyed.values()):
        if value in offsets:
            newest[key] = max(offsets[value], newest.get(key, -1))
    return {
        value
        for number, key, value, deletes in _records(keyed.values())
        if deletes or number in uncertain or newest.get(key, -1) > offsets.get(value, -1)
    }


def _records(appends: Iterable[Invoked]) -> Iterator[tuple[int, PartitionKey, bytes, bool]]:
    """Operation, key, value, and whether the record is a tombstone."""
    for append in appends:
        for at, (key, value) in enumerate(zip(append.keys, append.values, strict=True)):
            yield append.operation, (append.partition, key), value, at in append.tombstones
