"""Fetches from one leader, for one partition, over one stream. The next request is sent while an answer is used."""

from __future__ import annotations

from dataclasses import replace

from spark_broker.client.fetch_machine import Fetch, FetchedPart, FetchMachine, FetchTarget
from spark_broker.client.local_files import LocalFiles
from spark_broker.client.settings import Address
from spark_broker.config import ConsumerConfig
from spark_broker.errors import InvalidRequestError
from spark_broker.spark import kept


class RangeSession:
    """Fetches from the leader at `address`. Close it after an error: one within an answer leaves the stream usable."""

    def __init__(
        self, address: Address, directory: str, target: FetchTarget, fetches: FetchMachine, settings: ConsumerConfig
    ) -> None:
        """`directory`: the leader's log directory, where its files may be read. `target`: what to fetch."""
        self._target = target
        self._fetches = fetches
        self._settings = settings
        self._files = LocalFiles(directory)
        self._address = address
        self._stream = kept.KEPT.stream(address)
        self._fetch: Fetch | None = None  # whose answer is due

    def request(self, offset: int) -> None:
        """Ask for the batches from this offset on. Raises NetworkError or RequestTimedOutError."""
        self._fetch = self._fetches.request([replace(self._target, offset=offset)])
        self._stream.send(self._fetch.request, timeout_ms=self._settings.request_timeout_ms)

    def answer(self, *, timeout_ms: int) -> FetchedPart:
        """The answer to the request under way.

        It has no frames when nothing came within fetch.max.wait.ms, or when only markers and aborted batches came;
        `next_offset` is after these. Raises the error that refuses the request, NetworkError or RequestTimedOutError.
        Raises UnusableExtentError when the leader's files do not hold the batches that the answer names.
        """
        response, payload = self._stream.receive(timeout_ms=timeout_ms + self._settings.fetch_max_wait_ms)
        parts = self._fetches.parts(self._fetch, response, payload) if self._fetch is not None else []
        self._fetch = None
        if not parts:
            raise InvalidRequestError(f"a leader left {self._target.topic.name} out of its answer")
        part = parts[0]
        extents = part.response.extents
        return replace(part, local=self._files.frames(part.payload, extents)) if extents else part

    def close(self) -> None:
        """Close it, and keep the stream for the next task if no answer is due."""
        self._files.close()
        if self._fetch is None and not self._stream.closed:
            kept.KEPT.keep(self._address, self._stream)
        else:
            self._stream.close()
