"""Which topics were deleted, as far as an image remembers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

TOMBSTONES_MAX = 10_000
"""Deleted topics that an image remembers."""


class Tombstones:
    """The ids of the newest topics that were deleted, in order. That a topic is unknown does not say that it was."""

    def __init__(self, topic_ids: Sequence[str] = ()) -> None:
        self._topic_ids = tuple(topic_ids)

    @cached_property
    def _lookup(self) -> frozenset[str]:
        return frozenset(self._topic_ids)

    def __contains__(self, topic_id: object) -> bool:
        return topic_id in self._lookup

    def __iter__(self) -> Iterator[str]:
        return iter(self._topic_ids)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tombstones) and self._topic_ids == other._topic_ids

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<{len(self._topic_ids)} tombstones>"

    def with_one(self, topic_id: str) -> Tombstones:
        return Tombstones((*self._topic_ids[1 - TOMBSTONES_MAX :], topic_id))
