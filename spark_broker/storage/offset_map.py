"""The newest offset of each key in a part of a log, for compaction. Rows stay in Arrow's arrays."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from spark_broker.protocol.arrays import scalar_of, to_numpy

Offsets = npt.NDArray[np.int64]

_JOIN_ROWS = 500_000
"""So many rows wait before they are joined with the keys known: each join looks at all keys."""

_KEY_BYTES_MAX = 1 << 30
"""Arrow's arrays have at most 2 GiB of bytes."""

_NOT_FOUND = scalar_of(-1, pa.int32())


class OffsetMap:
    """Keys are compared as they are, not by a hash that two keys could share."""

    def __init__(self, max_bytes: int) -> None:
        """It counts as full from `max_bytes` of keys and offsets on, a GiB at most. A batch more may come then."""
        self._max_bytes = min(max_bytes, _KEY_BYTES_MAX)
        self._keys: pa.Array = pa.nulls(0, pa.binary())
        self._offsets = np.empty(0, np.int64)
        self._waiting: list[tuple[pa.Array, Offsets]] = []
        self._waiting_rows = 0
        self._waiting_bytes = 0

    def __len__(self) -> int:
        """How many keys there are."""
        self._join()
        return len(self._keys)

    @property
    def is_full(self) -> bool:
        if self._waiting_bytes + self._known_bytes >= self._max_bytes:
            self._join()
        return self._known_bytes >= self._max_bytes

    @property
    def _known_bytes(self) -> int:
        return int(self._keys.nbytes + self._offsets.nbytes)

    def add(self, keys: pa.Array, offsets: Offsets) -> None:
        """Take rows with these keys (binary; null: the row has none), whose offsets are above all that came before.

        The keys are copied: they may be a view of much larger messages.
        """
        copied = pa.concat_arrays([keys, pa.nulls(0, pa.binary())])
        if copied.null_count:
            valid = copied.is_valid()
            copied, offsets = copied.filter(valid), offsets[to_numpy(valid)]
        if len(copied):
            self._waiting.append((copied, offsets))
            self._waiting_rows += len(copied)
            self._waiting_bytes += int(copied.nbytes + offsets.nbytes)
        if self._waiting_rows >= _JOIN_ROWS:
            self._join()

    def _join(self) -> None:
        if not self._waiting:
            return
        rows = pa.concat_arrays([self._keys, *(keys for keys, _ in self._waiting)]).dictionary_encode()
        offsets = np.concatenate([self._offsets, *(offsets for _, offsets in self._waiting)])
        self._keys = rows.dictionary
        self._offsets = np.empty(len(self._keys), np.int64)
        self._offsets[to_numpy(rows.indices)] = offsets  # Offsets rise: the last of a key is its newest.
        self._waiting, self._waiting_rows, self._waiting_bytes = [], 0, 0

    def superseded(self, keys: pa.Array, offsets: Offsets) -> npt.NDArray[np.bool_]:
        """Which of these rows have a key that is known at a later offset. A row without a key is never superseded."""
        self._join()
        if not len(self._keys):
            return np.zeros(len(offsets), np.bool_)
        places = to_numpy(pc.fill_null(pc.index_in(keys, value_set=self._keys), _NOT_FOUND))
        newest: Offsets = self._offsets[places]
        return (places >= 0) & (newest > offsets)
