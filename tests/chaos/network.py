"""A network of namespaces: one for each broker, joined by a bridge, in which packets of one direction can be lost.

A neighbour entry cuts a direction: it names a hardware address that no interface has. What is sent there is lost
silently; what comes from there arrives. Nothing leaves the namespace in which the run itself is (`isolated`).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Self

from tests.support.process_cluster import Place

BRIDGE = "chaos0"
HUB = "10.77.0.1"
"""Where the controller and the clients are."""

NOBODY = "02:00:00:00:00:01"
INSIDE = "SPARK_BROKER_CHAOS_INSIDE"
HOLDER_S = "21600"

HUB_NODE = -1


def isolated(arguments: Sequence[str]) -> str:
    """Start Python again inside a network and mount namespace of its own; returns why that cannot be done.

    Returns "" when the program is inside already. Does not return when it can be done.
    """
    if os.environ.get(INSIDE):
        return _set_up()
    if shutil.which("unshare") is None or shutil.which("ip") is None or shutil.which("nsenter") is None:
        return "no unshare, nsenter or ip command"
    probe = ["unshare", "--net", "--mount", "ip", "link", "add", "chaosprobe", "type", "veth"]
    done = subprocess.run(probe, capture_output=True, text=True, check=False, timeout=30)
    if not done.returncode:
        sys.stdout.flush()
        sys.stderr.flush()
        os.environ[INSIDE] = "1"
        os.execvp("unshare", ["unshare", "--net", "--mount", sys.executable, *arguments])
    return done.stderr.strip() or "no network namespaces"


def _set_up() -> str:
    try:
        _ip("link", "set", "lo", "up")
        _ip("link", "add", BRIDGE, "type", "bridge")
        _ip("addr", "add", f"{HUB}/24", "dev", BRIDGE)
        _ip("link", "set", BRIDGE, "up")
    except subprocess.CalledProcessError as error:
        return str(error.stderr).strip()
    return ""


class Network:
    """A namespace for each broker. Nodes are slots; `HUB_NODE` is the controller's and the clients'."""

    def __init__(self, nodes: int) -> None:
        self._holders: list[subprocess.Popen[bytes]] = []
        with ExitStack() as undo:
            undo.callback(self.close)
            for node in range(nodes):
                self._add(node)
            undo.pop_all()

    @property
    def places(self) -> list[Place]:
        """Where the brokers run."""
        return [
            Place(address(node), ("nsenter", f"--net=/proc/{holder.pid}/ns/net"))
            for node, holder in enumerate(self._holders)
        ]

    @contextmanager
    def lossy(self, source: int, target: int) -> Iterator[None]:
        """As long as the block lasts, nothing that `source` sends to `target` arrives. The other direction works."""
        self._inside(
            source, "neigh", "replace", address(target), "lladdr", NOBODY, "dev", device(source), "nud", "permanent"
        )
        try:
            yield
        finally:
            self._inside(source, "neigh", "del", address(target), "dev", device(source))

    def _add(self, node: int) -> None:
        holder = subprocess.Popen(["unshare", "--net", "sleep", HOLDER_S])
        self._holders.append(holder)
        outer, inner = f"chaosb{node}", device(node)
        self._await_namespace(holder)
        _ip("link", "add", outer, "type", "veth", "peer", "name", inner)
        _ip("link", "set", outer, "master", BRIDGE, "up")
        _ip("link", "set", inner, "netns", str(holder.pid))
        self._inside(node, "link", "set", "lo", "up")
        self._inside(node, "addr", "add", f"{address(node)}/24", "dev", inner)
        self._inside(node, "link", "set", inner, "up")

    @staticmethod
    def _await_namespace(holder: subprocess.Popen[bytes]) -> None:
        """`unshare` has made the namespace once the process is `sleep`."""
        from tests.support.waiting import eventually

        own = os.stat("/proc/self/ns/net").st_ino  # noqa: PTH116
        eventually(lambda: os.stat(f"/proc/{holder.pid}/ns/net").st_ino != own, 10, "a namespace")  # noqa: PTH116

    def _inside(self, node: int, *arguments: str) -> None:
        if node == HUB_NODE:
            _ip(*arguments)
        else:
            _run("nsenter", f"--net=/proc/{self._holders[node].pid}/ns/net", "ip", *arguments)

    def close(self) -> None:
        for holder in self._holders:
            holder.kill()
            holder.wait(10)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def address(node: int) -> str:
    return HUB if node == HUB_NODE else f"10.77.0.{10 + node}"


def device(node: int) -> str:
    return BRIDGE if node == HUB_NODE else f"chaose{node}"


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=30)
