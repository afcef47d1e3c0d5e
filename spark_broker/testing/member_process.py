"""A member of a group in a process of its own, which can be killed without a word; its parent has the history.

`python -m spark_broker.testing.member_process <JSON>` is the process. It writes an event a line, and an empty line to
ask. It goes on when the parent has answered: with the number of events of the history, and whether it is to stop. So
an event is in the history before the member does what comes next, as if it were in the parent.
"""

from __future__ import annotations

import select
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from random import Random
from typing import IO, BinaryIO

import msgspec

from spark_broker.errors import broken
from spark_broker.testing.client_thread import ClientThread
from spark_broker.testing.group_workload import Sharing, SharingMember
from spark_broker.testing.history import Event, ReaderOpened
from spark_broker.testing.recorder import HistoryRecorder

CHUNK_BYTES = 1 << 16
END_S = 30.0
LOOK_S = 1.0

_decoder: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)


@dataclass(frozen=True, slots=True)
class Order:
    """Who the process is to be."""

    bootstrap_servers: str
    sharing: Sharing
    name: str
    seed: int


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """To each line of the process."""

    events: int
    stop: bool


class RemoteRecorder(HistoryRecorder):
    """Records into the parent's history. `ended`: the parent says so, or is gone."""

    def __init__(self, answers: BinaryIO, lines: BinaryIO) -> None:
        super().__init__()
        self.ended = threading.Event()
        self._answers, self._lines = answers, lines
        self._pipes = threading.Lock()

    @property
    def event_count(self) -> int:
        return self._ask(b"")

    def _add(self, event: Event) -> None:
        self._ask(msgspec.json.encode(event))

    def _ask(self, line: bytes) -> int:
        with self._pipes:
            self._lines.write(line + b"\n")
            self._lines.flush()
            told = self._answers.readline()
        if not told:
            self.ended.set()
            raise EOFError("the parent of this member is gone")
        answer = msgspec.json.decode(told, type=Answer)
        if answer.stop:
            self.ended.set()
        return answer.events


class MemberProcess(ClientThread):
    """A `SharingMember` in a process of its own, again and again. It is killed after `life_s` seconds on average.

    `stops`: in this share of its lives the whole process stands still once, for longer than a session.
    """

    def __init__(
        self,
        recorder: HistoryRecorder,
        bootstrap_servers: str,
        sharing: Sharing,
        *,
        name: str,
        seed: int = 0,
        life_s: float = 10.0,
        stops: float = 0.0,
    ) -> None:
        super().__init__(name, pause_s=0.0)
        self.kills = 0
        self.lives = 0
        self._recorder = recorder
        self._bootstrap_servers = bootstrap_servers
        self._sharing = sharing
        self._rng = Random(f"{seed}/{name}")
        self._life_s = life_s
        self._stops = stops
        self._life = ""
        self._process: subprocess.Popen[bytes] | None = None

    def step(self) -> None:
        """One life, from the start to the kill, or to the stop of this thread."""
        self.renew()
        life = f"{self.name}-{self.lives}"
        self.lives += 1
        order = Order(self._bootstrap_servers, self._sharing, life, self._rng.randrange(1 << 30))
        command = [sys.executable, "-m", "spark_broker.testing.member_process", msgspec.json.encode(order).decode()]
        pipe = subprocess.PIPE
        self._process = process = subprocess.Popen(command, stdin=pipe, stdout=pipe, bufsize=0)
        lasts_s = self._rng.uniform(0.3, 1.7) * self._life_s
        faults = [(lasts_s, signal.SIGKILL)]
        if self._rng.random() < self._stops:
            stands_still_s = self._rng.uniform(1.0, 2.0) * self._sharing.session_timeout_ms / 1000
            stopped_s = self._rng.uniform(0.2, 1.0) * lasts_s
            faults += [(stopped_s, signal.SIGSTOP), (stopped_s + stands_still_s, signal.SIGCONT)]
        killed = self._serve(process, sorted(faults))
        if process.wait(END_S) != 0 and not killed:
            raise RuntimeError(f"the process of {life} ended with {process.returncode}")
        if killed:
            self.kills += 1
            if self._life:
                self._recorder.gone(self._life)

    def renew(self) -> None:
        """End a process that is left over."""
        process, self._process, self._life = self._process, None, ""
        if process is not None:
            if process.poll() is None:
                process.kill()
                process.wait()
            for pipe in (process.stdin, process.stdout):
                _opened(pipe).close()

    def _serve(self, process: subprocess.Popen[bytes], faults: list[tuple[float, signal.Signals]]) -> bool:
        """Record what the process tells, until it ends. `faults`: signals, and after how many seconds they come.

        Returns whether it was killed. Once this thread is to stop, a process goes on, and no other fault comes.
        """
        told, answers = _opened(process.stdout), _opened(process.stdin)
        began_s, sent, rest = time.monotonic(), set[signal.Signals](), b""
        while True:
            while faults and (self._stopping.is_set() or faults[0][0] <= time.monotonic() - began_s):
                _, number = faults.pop(0)
                if number is signal.SIGCONT or not self._stopping.is_set():
                    process.send_signal(number)
                    sent.add(number)
            killed = signal.SIGKILL in sent
            wait_s = min(faults[0][0] - (time.monotonic() - began_s), LOOK_S) if faults else LOOK_S
            if not select.select([told], [], [], max(wait_s, 0.0))[0]:
                continue
            chunk = told.read(CHUNK_BYTES)
            if not chunk:
                return killed
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                self._record(line)
                if not killed:
                    answer = Answer(self._recorder.event_count, self._stopping.is_set())
                    answers.write(msgspec.json.encode(answer) + b"\n")

    def _record(self, line: bytes) -> None:
        if line:
            event = _decoder.decode(line)
            self._recorder.add(event)
            if isinstance(event, ReaderOpened):
                self._life = event.reader


def _opened(pipe: IO[bytes] | None) -> IO[bytes]:
    if pipe is None:
        broken("a process without the pipe that it was started with")
    return pipe


def main() -> None:
    """Be the member until the parent says stop."""
    order = msgspec.json.decode(sys.argv[1], type=Order)
    recorder = RemoteRecorder(sys.stdin.buffer, sys.stdout.buffer)
    member = SharingMember(recorder, order.bootstrap_servers, order.sharing, name=order.name, seed=order.seed)
    member.start()
    while member.is_running and not recorder.ended.wait(LOOK_S):
        pass
    member.stop()


if __name__ == "__main__":
    main()
