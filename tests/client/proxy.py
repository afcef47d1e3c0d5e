"""A TCP proxy in front of a server, so that a test can cut or freeze its connections as a dead machine does."""

from __future__ import annotations

import contextlib
import socket
import threading


class Proxy:
    """Forwards `127.0.0.1:port` to `127.0.0.1:target`. Threads end with their sockets."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._flowing = threading.Event()
        self._flowing.set()
        self._listener = self._listen(0)
        self.port: int = self._listener.getsockname()[1]

    def kill(self) -> None:
        """As SIGKILL: the port refuses, and every connection is reset."""
        with self._lock:  # A connection that is being made sees the closed listener, or is closed here.
            for sock in [self._listener, *self._sockets]:
                _close(sock)
            self._sockets.clear()
        self._flowing.set()

    def revive(self) -> None:
        """The port answers again."""
        self._flowing.set()
        self._listener = self._listen(self.port)

    def freeze(self) -> None:
        """As SIGSTOP: connections stay open and nothing moves on them."""
        self._flowing.clear()

    def thaw(self) -> None:
        self._flowing.set()

    def _listen(self, port: int) -> socket.socket:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(64)
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
        return listener

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                try:
                    server = socket.create_connection(("127.0.0.1", self._target))
                except OSError:
                    client.close()
                    raise
                self._join(listener, client, server)

    def _join(self, listener: socket.socket, client: socket.socket, server: socket.socket) -> None:
        for sock in (client, server):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._lock:
            if listener.fileno() < 0:  # The proxy was killed while this connection was being made.
                _close(client)
                _close(server)
                return
            self._sockets |= {client, server}
        for source, sink in ((client, server), (server, client)):
            threading.Thread(target=self._forward, args=(source, sink), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self._flowing.wait()
                sink.sendall(data)
        for sock in (source, sink):
            _close(sock)
        with self._lock:
            self._sockets -= {source, sink}


def _close(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
    one.close()
