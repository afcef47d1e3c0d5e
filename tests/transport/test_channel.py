"""What a peer receives are whole frames in order, or the end: whatever interrupts a sender."""

from __future__ import annotations

import contextlib
import random
import select
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from spark_broker.errors import NetworkError, RequestTimedOutError
from spark_broker.protocol.wire import Buffer
from spark_broker.transport import channel as channel_module
from spark_broker.transport import sockets
from spark_broker.transport.channel import UNSENT, UNSENT_MAX_BYTES, Channel
from spark_broker.transport.frames import Frame, FrameHeader, FrameReader, Operation, encode
from spark_broker.transport.io_loop import SCRATCH_BYTES, IoLoop
from spark_broker.transport.sockets import PARTS_MAX, prepare
from tests.support.alarms import Stop, alarms_stop
from tests.support.waiting import eventually

HOST = "127.0.0.1"
WAIT_S = 30.0
LARGE = bytes(200_000)


@pytest.fixture
def loop() -> Iterator[IoLoop]:
    bugs: list[BaseException] = []
    loop = IoLoop("channel-io", bugs.append)
    loop.begin()
    yield loop
    loop.stop()
    loop.join(WAIT_S)
    assert not loop.is_alive()
    assert bugs == []


def pair(kind: type[socket.socket] = socket.socket) -> tuple[socket.socket, socket.socket]:
    """Two ends of a connection; the first is of this class."""
    with socket.create_server((HOST, 0)) as listening:
        mine = kind(socket.AF_INET, socket.SOCK_STREAM)
        mine.connect(listening.getsockname())
        theirs, _ = listening.accept()
    theirs.settimeout(WAIT_S)
    return mine, theirs


class Peer:
    """The other end. It reads nothing before `read`."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    def read(self) -> tuple[list[Frame], bool]:
        """The frames that come until the connection ends, and whether half of another one followed. A frame that is
        none is an InvalidRequestError."""
        reader, frames = FrameReader(lambda header: True), []
        with contextlib.suppress(ConnectionError):
            while data := self.sock.recv(1 << 20):
                frames += list(reader.feed(memoryview(data)))
        return frames, reader.is_within_a_frame


def admit_all(header: FrameHeader) -> bool:
    del header
    return True


def ignore(frame: Frame) -> None:
    del frame


@contextmanager
def connected(
    loop: IoLoop,
    kind: type[socket.socket] = socket.socket,
    on_frame: Callable[[Frame], object] = ignore,
    admit: Callable[[FrameHeader], bool] = admit_all,
) -> Iterator[tuple[Channel, Peer]]:
    mine, theirs = pair(kind)
    prepare(mine)
    ended: list[str] = []
    channel = Channel(loop, mine, admit=admit, on_frame=on_frame, on_closed=ended.append)
    channel.start()
    with theirs:
        yield channel, Peer(theirs)
        channel.close("the test is over")
        eventually(lambda: ended, WAIT_S, "the owner is told of the end")
        assert len(ended) == 1


def frame(number: int) -> list[Buffer]:
    return encode(Operation.MESSAGE, b"%d" % number, LARGE[:300], LARGE[:7], stream=1)


def turn(loop: IoLoop) -> None:
    """Have the loop's thread look at all sockets that are ready now."""
    for _ in range(2):
        done = threading.Event()
        loop.soon(done.set)
        assert done.wait(WAIT_S)


def numbers(frames: list[Frame]) -> list[int]:
    return [int(bytes(each.message)) for each in frames]


class InterruptedSocket(socket.socket):
    """A signal comes when the system has a part of what is written, and Python has not counted it."""

    interrupts_at = 3
    calls = 0

    def sendmsg(self, buffers: object, *rest: object) -> int:
        self.calls += 1
        if self.calls == self.interrupts_at:
            super().sendmsg([list(buffers)[0][:10]])  # type: ignore[call-overload] # noqa: RUF015
            raise KeyboardInterrupt
        return super().sendmsg(buffers, *rest)  # type: ignore[arg-type]


def test_nothing_follows_a_frame_of_which_an_interrupt_left_a_part_with_the_system(loop: IoLoop) -> None:
    with connected(loop, InterruptedSocket) as (channel, peer):
        channel.send(frame(0))
        channel.send(frame(1))
        with pytest.raises(KeyboardInterrupt):
            channel.send(frame(2))
        with pytest.raises(NetworkError, match="interrupted while it sent"):
            channel.send(frame(3))
        frames, half = peer.read()
    assert (numbers(frames), half) == ([0, 1], True)


def test_nothing_follows_a_frame_of_which_an_interrupt_left_a_part_in_the_queue(loop: IoLoop) -> None:
    def interrupted() -> Iterator[Buffer]:
        yield frame(1)[0]
        raise KeyboardInterrupt

    with connected(loop) as (channel, peer):
        channel.send(frame(0))
        with pytest.raises(KeyboardInterrupt):
            channel.send(interrupted())
        with pytest.raises(NetworkError, match="interrupted while it sent"):
            channel.send(frame(2))
        frames, _ = peer.read()
    assert numbers(frames) == [0]


def test_interrupts_at_any_moment_leave_whole_frames_in_order(loop: IoLoop) -> None:
    """A real signal, whose handler raises, as Ctrl-C does."""
    draw = random.Random(7)
    with alarms_stop() as alarms:
        for _ in range(60):
            with connected(loop) as (channel, peer):
                got: list[tuple[list[Frame], bool]] = []
                reading = threading.Thread(target=lambda peer=peer, got=got: got.append(peer.read()))
                reading.start()
                sent = 0
                with contextlib.suppress(Stop):
                    alarms.stop_in(draw.uniform(0.0005, 0.004))
                    while not alarms.rang:
                        channel.send(frame(sent))
                        sent += 1
                with contextlib.suppress(NetworkError):
                    channel.send(frame(10**9))
                channel.close("everything is said")
                reading.join(WAIT_S)
            ((frames, _),) = got
            # The frame that was interrupted may have gone out as a whole.
            seen = [number for number in numbers(frames) if number != 10**9]
            assert seen == list(range(len(seen)))
            assert len(seen) <= sent + 1
            if 10**9 in numbers(frames):
                assert numbers(frames)[-1] == 10**9


def test_many_threads_send_whole_frames_and_each_in_its_order(loop: IoLoop) -> None:
    threads, each = 8, 200
    with connected(loop) as (channel, peer):

        def send(first: int) -> None:
            for number in range(first, first + each):
                channel.send(frame(number))

        senders = [threading.Thread(target=send, args=(number * each,)) for number in range(threads)]
        for sender in senders:
            sender.start()
        got: list[tuple[list[Frame], bool]] = []
        reading = threading.Thread(target=lambda: got.append(peer.read()))
        reading.start()
        for sender in senders:
            sender.join(WAIT_S)
        channel.wait_written(channel.send(frame(threads * each)), WAIT_S)
        channel.close("everything is said")
        reading.join(WAIT_S)
    ((frames, half),) = got
    seen = numbers(frames)
    assert not half
    assert sorted(seen) == list(range(threads * each + 1))
    for first in range(0, threads * each, each):
        assert [number for number in seen if first <= number < first + each] == list(range(first, first + each))


def test_more_parts_than_one_system_call_takes_are_written(loop: IoLoop) -> None:
    parts = [b"x"] * (3 * PARTS_MAX) + [b""] * PARTS_MAX
    with connected(loop) as (channel, peer):
        channel.send(encode(Operation.MESSAGE, b"m", *parts))
        channel.wait_written(channel.send(encode(Operation.MESSAGE, b"n")), WAIT_S)
        channel.close("everything is said")
        frames, half = peer.read()
    assert [bytes(each.payload) for each in frames] == [b"x" * 3 * PARTS_MAX, b""]
    assert not half


@pytest.mark.parametrize("ends", ["this side", "the peer", "a reset"])
def test_each_callback_is_called_once_whether_its_bytes_were_written_or_not(loop: IoLoop, ends: str) -> None:
    called: list[int] = []
    with connected(loop) as (channel, peer):
        channel.send(frame(0), lambda: called.append(0))
        assert called == [0]
        for number in range(1, 100):
            channel.send([LARGE], lambda number=number: called.append(number))  # type: ignore[misc]
        assert len(called) < 100
        assert channel.unsent_bytes
        if ends == "this side":
            channel.close("enough")
        else:
            if ends == "a reset":
                peer.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            peer.sock.close()
        eventually(lambda: len(called) >= 100, WAIT_S, "all callbacks")
    assert called == list(range(100))
    with pytest.raises(NetworkError):
        channel.send(frame(1), lambda: called.append(-1))
    assert called == list(range(100))


def test_whoever_waits_for_a_peer_is_woken_when_the_connection_ends(loop: IoLoop) -> None:
    errors: list[str] = []
    with connected(loop) as (channel, _):
        position = channel.send([LARGE] * 100)

        def wait() -> None:
            with pytest.raises(NetworkError) as error:
                channel.wait_written(position, WAIT_S)
            errors.append(error.value.message)

        waiting = threading.Thread(target=wait)
        waiting.start()
        with pytest.raises(RequestTimedOutError):
            channel.wait_written(position, 0.05)
        channel.close("enough")
        waiting.join(WAIT_S)
    assert errors == ["enough"]


def test_a_peer_that_reads_slowly_is_waited_for_as_long_as_it_reads(loop: IoLoop) -> None:
    """The time-out is of silence, not of a message."""
    with connected(loop) as (channel, peer):
        position = channel.send([LARGE] * 100)
        stop = threading.Event()

        def read_slowly() -> None:
            left = 100 * len(LARGE)
            while left:
                stop.wait(0.02)
                left -= len(peer.sock.recv(400_000))

        reading = threading.Thread(target=read_slowly)
        reading.start()
        channel.wait_written(position, 0.5)
        reading.join(WAIT_S)


def test_what_arrived_before_the_end_is_handled_before_it(loop: IoLoop) -> None:
    """A peer says why, and closes: this side, which still writes, must read the reason."""
    got: list[int] = []
    busy, go_on = threading.Event(), threading.Event()

    def work() -> None:
        busy.set()
        assert go_on.wait(WAIT_S)

    with connected(loop, on_frame=lambda each: got.append(int(bytes(each.message)))) as (channel, peer):
        channel.send(frame(0))
        loop.soon(work)
        assert busy.wait(WAIT_S)
        peer.sock.sendall(b"".join(bytes(part) for number in range(50) for part in frame(number)))
        peer.sock.close()  # What it has not read makes this a reset.
        channel.send(frame(1))
        go_on.set()
        eventually(lambda: channel.closed, WAIT_S, "the end")
        eventually(lambda: got == list(range(50)), WAIT_S, "what was said before it")


def test_nothing_that_came_with_it_is_handled_once_the_connection_is_closed(loop: IoLoop) -> None:
    got: list[int] = []

    def close_at_third(each: Frame) -> None:
        got.append(int(bytes(each.message)))
        if len(got) == 3:
            channel.close("enough")

    with connected(loop, on_frame=close_at_third) as (channel, peer):
        peer.sock.sendall(b"".join(bytes(part) for number in range(10) for part in frame(number)))
        peer.read()
    assert got == [0, 1, 2]


def test_a_peer_that_takes_nothing_is_not_read_until_it_does_however_small_what_it_leaves(loop: IoLoop) -> None:
    """Story: only the first frame that did not fit was counted; those behind it were kept, however many came."""
    got: list[Frame] = []
    with connected(loop, on_frame=got.append) as (channel, peer):
        while not channel.unsent_bytes:
            channel.send([LARGE])
        turn(loop)
        peer.sock.sendall(b"".join(map(bytes, frame(0))))
        eventually(lambda: len(got) == 1, WAIT_S, "a peer that leaves little is read")
        while channel.unsent_bytes <= UNSENT_MAX_BYTES:
            channel.send([LARGE[:1000]])
        turn(loop)
        peer.sock.sendall(b"".join(map(bytes, frame(1))))
        turn(loop)
        assert len(got) == 1
        left = channel._position
        while left:
            left -= len(peer.sock.recv(min(left, 1 << 20)))
        eventually(lambda: len(got) == 2, WAIT_S, "the peer is read again")


def test_a_peer_that_is_answered_at_once_and_takes_nothing_is_read_no_further(loop: IoLoop) -> None:
    """Story: sixteen reads were answered before the pause, which the loop's thread had only put on its list."""
    answered = 0

    def answer(received: Frame) -> None:
        nonlocal answered
        del received
        answered += 1
        channel.send([LARGE[:10_000]])

    with connected(loop, on_frame=answer) as (channel, peer):
        small = b"".join(bytes(part) for part in encode(Operation.CANCEL, stream=1))
        while channel.unsent_bytes <= UNSENT_MAX_BYTES // 2:
            channel.send([LARGE])
        turn(loop)
        peer.sock.sendall(small * 20_000)
        eventually(lambda: UNSENT in channel._paused, WAIT_S, "the peer is not read")
        turn(loop)
        assert answered <= 2 * SCRATCH_BYTES / len(small), "what one read brought, and a part of one before"


@pytest.mark.parametrize("is_written_to_before", [False, True])
def test_a_frame_that_comes_in_the_midst_of_a_large_answer_is_not_the_last(
    loop: IoLoop, monkeypatch: pytest.MonkeyPatch, is_written_to_before: bool
) -> None:
    """Story: the next request came while a thread sent an answer of megabytes. The thread of the loop saw all of that
    waiting, and received no more until somebody would have written the rest. But the system took it at once, so nobody
    was to write anything: a reader heard nothing for 30 s, until its own time-out.
    """
    received: list[Frame] = []
    real = sockets.write_some
    with connected(loop, on_frame=received.append) as (channel, peer):
        sock = peer.sock
        taken = threading.Thread(target=peer.read, daemon=True)

        def write_some(mine: socket.socket, parts: deque[memoryview]) -> int:
            if threading.current_thread() is threading.main_thread() and len(received) == before:
                sock.sendall(b"".join(frame(1)))
                # The loop's thread may wait for this thread after it has handed the frame on.
                eventually(lambda: len(received) > before, WAIT_S, "the frame")
                with contextlib.suppress(TimeoutError):
                    eventually(lambda: UNSENT in channel._paused, 0.3)
            if threading.current_thread() is not threading.main_thread():
                return real(mine, parts)
            taking = True
            count = 0
            while parts and taking:  # The system has room for all of it.
                try:
                    count += real(mine, parts)
                except BlockingIOError:
                    eventually(lambda: select.select([], [mine], [], 0)[1], WAIT_S)
            return count

        if is_written_to_before:  # The loop's thread has written the rest of something once.
            channel.send(encode(Operation.MESSAGE, bytes(16 << 20), stream=1))
            taken.start()
            eventually(lambda: not channel.unsent_bytes and not channel._paused, WAIT_S, "it is taken")
        else:
            taken.start()
        before = len(received)
        monkeypatch.setattr(channel_module, "write_some", write_some)
        channel.send(encode(Operation.MESSAGE, bytes(UNSENT_MAX_BYTES + 1), stream=1))
        monkeypatch.setattr(channel_module, "write_some", real)
        sock.sendall(b"".join(frame(2)))
        eventually(lambda: numbers(received)[-1] == 2, WAIT_S, "the next frame")
        channel.close("the test is over")
        taken.join(WAIT_S)


class Clock:
    """Stands where it is set."""

    now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


def test_a_frame_that_waits_for_room_takes_no_time(loop: IoLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, got = Clock(), list[Frame]()
    room: list[bool] = []
    monkeypatch.setattr(channel_module, "time", clock)
    with connected(loop, on_frame=got.append, admit=lambda header: bool(room)) as (channel, peer):
        sent = b"".join(map(bytes, frame(0)))
        peer.sock.sendall(sent[:-1])
        eventually(lambda: "no room" in channel._paused, WAIT_S, "the frame waits for room")
        clock.now_s += 100
        assert channel.frame_for_s == 0
        room.append(True)
        loop.soon(lambda: channel.resume("no room"))
        turn(loop)
        assert channel.frame_for_s == 0
        clock.now_s += 5
        assert channel.frame_for_s == 5
        peer.sock.sendall(sent[-1:])
        eventually(lambda: got, WAIT_S, "the frame")
        turn(loop)
        assert channel.frame_for_s == 0


def test_the_time_of_a_frame_goes_on_while_its_peer_is_not_read_by_its_own_doing(
    loop: IoLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(channel_module, "time", clock)
    with connected(loop, on_frame=lambda _: None) as (channel, peer):
        peer.sock.sendall(b"".join(map(bytes, frame(0)))[:-1])
        eventually(lambda: channel._reader.is_within_a_frame, WAIT_S, "the frame has begun")
        turn(loop)
        kept = [channel.frame_kept_for_s]

        def then(change: Callable[[str], None], why: str) -> None:
            loop.soon(lambda: change(why))
            turn(loop)
            clock.now_s += 1
            kept.append(channel.frame_kept_for_s)

        for change, why in [(channel.pause, UNSENT), (channel.pause, "ours"), (channel.pause, "ours, too")]:
            then(change, why)
        assert kept == [0, 1, 1, 1]
        for change, why in [(channel.resume, "ours"), (channel.resume, "ours, too"), (channel.resume, UNSENT)]:
            then(change, why)
        assert kept[4:] == [1, 2, 3]
        assert channel.frame_for_s == 1


def test_who_waits_for_what_was_written_is_not_told_that_the_peer_left_afterwards(loop: IoLoop) -> None:
    """Story: a client read the last answer and closed; the handler that had sent it took the answer for lost."""
    with connected(loop) as (channel, peer):
        position = channel.send(encode(Operation.MESSAGE, b"m"))
        peer.sock.close()
        eventually(lambda: channel.closed, WAIT_S, "the end of the connection")
        channel.wait_written(position, WAIT_S)
        with pytest.raises(NetworkError):
            channel.wait_written(position + 1, WAIT_S)
