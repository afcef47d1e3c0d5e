"""Whose turn it is among a broker's clients."""

from __future__ import annotations

import threading

import pytest

from spark_broker.broker import request_queue
from spark_broker.broker.request_queue import RequestKind, RequestQueue
from spark_broker.errors import ThrottlingQuotaExceededError
from tests.support.waiting import eventually

CALL, APPEND, FETCH = RequestKind.CALL, RequestKind.APPEND, RequestKind.FETCH
LONG_S = 30.0


class Waiter(threading.Thread):
    """Takes one turn in its own thread, appends its name to `served`, and keeps the turn until `done` is set."""

    def __init__(self, queue: RequestQueue, kind: RequestKind, served: list[str], name: str) -> None:
        super().__init__(daemon=True)
        self._queue, self._kind, self._served, self._name = queue, kind, served, name
        self.done = threading.Event()
        waiting = queue.waiting
        self.start()
        eventually(lambda: queue.waiting > waiting or name in served)

    def run(self) -> None:
        with self._queue.turn(self._kind, LONG_S):
            self._served.append(self._name)
            self.done.wait(LONG_S)


def test_as_many_as_there_are_handlers_work_and_the_next_one_follows_when_one_has_ended() -> None:
    queue, served = RequestQueue(2, 10), list[str]()
    waiters = [Waiter(queue, FETCH, served, name) for name in "abc"]
    assert (sorted(served), queue.working, queue.waiting) == (["a", "b"], 2, 1)

    waiters[0].done.set()
    eventually(lambda: "c" in served)
    assert (queue.working, queue.waiting) == (2, 0)

    for waiter in waiters:
        waiter.done.set()
        waiter.join(LONG_S)
    assert (queue.working, queue.waiting) == (0, 0)


def test_kinds_take_turns_so_that_a_call_is_not_behind_all_fetches() -> None:
    queue, served = RequestQueue(1, 10), list[str]()
    with queue.turn(FETCH, 0.0):
        order = [(FETCH, "f1"), (FETCH, "f2"), (FETCH, "f3"), (CALL, "c1"), (APPEND, "a1"), (CALL, "c2")]
        waiters = [Waiter(queue, kind, served, name) for kind, name in order]
        for waiter in waiters:
            waiter.done.set()
    for waiter in waiters:
        waiter.join(LONG_S)
    assert served == ["c1", "a1", "f1", "c2", "f2", "f3"]


def test_who_finds_too_many_waiting_is_throttled_at_once_and_other_kinds_are_not() -> None:
    queue, served = RequestQueue(1, 1), list[str]()
    with queue.turn(APPEND, 0.0):
        waiters = [Waiter(queue, APPEND, served, "a"), Waiter(queue, FETCH, served, "f")]
        with pytest.raises(ThrottlingQuotaExceededError, match="1 appends wait"), queue.turn(APPEND, LONG_S):
            pass
    for waiter in waiters:
        waiter.done.set()
        waiter.join(LONG_S)
    assert sorted(served) == ["a", "f"]


def test_whose_turn_does_not_come_in_time_is_throttled_and_leaves_the_line() -> None:
    queue = RequestQueue(1, 1)
    with queue.turn(APPEND, 0.0):
        for _ in range(2):
            with pytest.raises(ThrottlingQuotaExceededError, match="within 10 ms"), queue.turn(APPEND, 0.01):
                pass
        assert (queue.working, queue.waiting) == (1, 0)
    with queue.turn(APPEND, 0.0):
        pass


def test_who_waits_for_something_else_lets_others_work_meanwhile() -> None:
    queue = RequestQueue(1, 1)
    with queue.turn(APPEND, 0.0) as mine:
        mine.end()
        with queue.turn(APPEND, 0.0):
            assert queue.working == 1
        mine.begin()
        assert queue.working == 1
    assert queue.working == 0


def test_a_turn_that_was_not_had_again_is_not_given_back_twice() -> None:
    queue = RequestQueue(1, 1)

    def try_again() -> None:
        with queue.turn(APPEND, 0.01) as mine:
            mine.end()
            with queue.turn(APPEND, 0.0):
                mine.begin()

    with pytest.raises(ThrottlingQuotaExceededError):
        try_again()
    assert queue.working == 0


def test_no_turn_is_lost_or_made_where_many_come_give_way_and_give_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_queue, "TURN_MAX_S", 0.0)
    monkeypatch.setattr(request_queue, "RESUME_WAIT_S", 0.0005)
    queue, working, outcomes = RequestQueue(3, 5), list[int](), list[str]()

    def hammer() -> None:
        for number in range(300):
            try:
                with queue.turn(list(RequestKind)[number % 3], 0.0005) as mine:
                    working.append(queue.working)
                    mine.give_way()
                    working.append(queue.working)
                outcomes.append("served")
            except ThrottlingQuotaExceededError:
                outcomes.append("throttled")

    threads = [threading.Thread(target=hammer) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
    assert len(outcomes) == 16 * 300
    assert max(working) <= 3
    assert (queue.working, queue.waiting) == (0, 0)


def test_a_request_that_gives_way_goes_on_behind_those_that_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_queue, "TURN_MAX_S", 0.0)
    queue, served = RequestQueue(1, 10), list[str]()
    with queue.turn(CALL, 0.0) as mine:
        mine.give_way()  # nobody waits
        waiters = [Waiter(queue, kind, served, name) for kind, name in ((APPEND, "a"), (CALL, "c"))]
        for waiter in waiters:
            waiter.done.set()
        while len(served) < 2:
            mine.give_way()
            assert queue.working == 1
    for waiter in waiters:
        waiter.join(LONG_S)
    assert sorted(served) == ["a", "c"]
    assert (queue.working, queue.waiting) == (0, 0)


def test_a_turn_that_has_just_begun_is_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_queue, "TURN_MAX_S", LONG_S)
    queue, served = RequestQueue(1, 10), list[str]()
    with queue.turn(CALL, 0.0) as mine:
        waiter = Waiter(queue, APPEND, served, "a")
        waiter.done.set()
        mine.give_way()
        assert served == []
    waiter.join(LONG_S)


def test_a_short_call_does_not_wait_behind_long_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_queue, "TURN_MAX_S", 0.0)
    queue, served = RequestQueue(1, 100), list[str]()
    stop = threading.Event()

    def long_call() -> None:
        with queue.turn(CALL, LONG_S) as mine:
            while not stop.is_set():
                mine.give_way()

    threads = [threading.Thread(target=long_call, daemon=True) for _ in range(20)]
    for thread in threads:
        thread.start()
    eventually(lambda: len(queue._lanes[RequestKind.LONG]) > 10)
    waiter = Waiter(queue, CALL, served, "short")
    waiter.done.set()
    waiter.join(LONG_S)
    assert served == ["short"]
    stop.set()
    for thread in threads:
        thread.join(LONG_S)
    assert (queue.working, queue.waiting) == (0, 0)
