"""A frame for which the process has no memory ends its own connection, and says why; nothing else ends."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from spark_broker.errors import NetworkError, NoMemoryError
from spark_broker.protocol import wire
from spark_broker.protocol.messages import ErrorResponse
from spark_broker.transport import frames, server_connection
from spark_broker.transport.client import Connection
from spark_broker.transport.frames import Operation, encode
from spark_broker.transport.io_loop import SCRATCH_BYTES
from tests.support.raw_peer import joined
from tests.transport.rig import CALL, REQUEST, rig

LARGE = bytes(2 * SCRATCH_BYTES)


class NoRoom:
    """In the place of numpy: there is no memory for any payload."""

    uint8 = np.uint8

    def empty(self, size: int, kind: object) -> None:
        raise MemoryError(f"Unable to allocate {size} bytes of {kind}")


def test_a_request_without_memory_ends_its_connection_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Story: it ended the thread that moves bytes, and so the broker; the client sent it to the next one."""
    message = joined(encode(Operation.MESSAGE, wire.encode(REQUEST), LARGE, stream=1))
    with rig(monkeypatch) as served, served.peer() as other:
        other.open("echo")
        with monkeypatch.context() as patch, served.peer() as peer:
            patch.setattr(frames, "np", NoRoom())
            peer.open("held")
            peer.write(message[: SCRATCH_BYTES // 2])
            (end,) = peer.frames()
            assert end.header.operation is Operation.END
            said = wire.decode_message(end.message)
            assert isinstance(said, ErrorResponse)
            assert said.error_code == NoMemoryError.code
            served.await_used(0)
        other.message(REQUEST)
        assert other.receive() is not None
    assert "was not received: [NO_MEMORY] MemoryError: Unable to allocate" in caplog.text


def refuse_to_clients(data: memoryview) -> memoryview:
    if threading.current_thread().name == "client-io":
        raise MemoryError("no copy")
    return memoryview(bytearray(data))


def test_an_answer_without_memory_ends_its_connection_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with rig(monkeypatch) as served:
        first, second = (Connection(served.host, served.server.port) for _ in range(2))
        for connection in (first, second):
            connection.call(CALL, timeout_ms=20_000)
        link = second._link
        with monkeypatch.context() as patch:
            patch.setattr(frames, "_copied", refuse_to_clients)
            with pytest.raises(NetworkError, match="MemoryError"):
                first.call(CALL, timeout_ms=20_000)
        second.call(CALL, timeout_ms=20_000)
        assert second._link is link
        first.call(CALL, timeout_ms=20_000)
        first.close()
        second.close()


def test_an_answer_that_the_server_cannot_make_ends_its_connection_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise MemoryError("no answer")

    with rig(monkeypatch) as served:
        connection = Connection(served.host, served.server.port)
        with monkeypatch.context() as patch:
            patch.setattr(server_connection, "encode", refuse)
            with pytest.raises(NetworkError):
                connection.call(CALL, timeout_ms=20_000)
        connection.call(CALL, timeout_ms=20_000)
        connection.close()
