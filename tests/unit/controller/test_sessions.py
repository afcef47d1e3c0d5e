"""Sessions as readable transcripts: what the controller does, event by event, when brokers go."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from spark_broker.controller.effects import CloseSession, FenceBrokers, Note, ProbePort, SessionEffect
from spark_broker.controller.image import BrokerState
from spark_broker.controller.sessions import TRANSITIONS, Session, Sessions, SessionState, SessionTimes, Signal
from spark_broker.errors import InvariantError

TIMES = SessionTimes(session_timeout_ms=9000, reconnect_grace_ms=300, probe_interval_ms=50, late_ms=300)


def broker(id_: int, launch: int = 0, epoch: int = 1) -> BrokerState:
    return BrokerState(
        id_, epoch, f"d{id_}", f"i{id_}", launch or id_ + 1, "h", 9000 + id_, None, "m", f"e{id_}", 1, 1, 1, "clean"
    )


def three_sessions() -> Sessions:
    sessions = Sessions(TIMES)
    for id_ in range(3):
        sessions.opened(10 + id_, broker(id_), 0)
    return sessions


def told(effects: Sequence[SessionEffect]) -> list[str]:
    """The effects, one line each."""
    lines = []
    for effect in effects:
        match effect:
            case FenceBrokers():
                lines.append("fence " + " ".join(map(str, effect.broker_ids)))
            case ProbePort():
                lines.append(f"probe {effect.broker_id}")
            case CloseSession():
                lines.append(f"close {effect.session_id}")
            case Note():
                lines.append(effect.text.split(":")[0])
            case _:
                lines.append(type(effect).__name__)
    return lines


def run_until(sessions: Sessions, start_ms: int, end_ms: int, step_ms: int = 50) -> list[str]:
    """Tick from start to end and answer probes at once; returns what happened as `time: effect`."""
    lines = []
    for now in range(start_ms, end_ms + 1, step_ms):
        for effect in sessions.tick(now):
            lines += [f"{now}: {line}" for line in told([effect]) if not line.startswith("probe")]
            if isinstance(effect, ProbePort):
                sessions.probed(effect.broker_id, effect.session_id, refused=False, now_ms=now)
    return lines


def answer(sessions: Sessions, id_: int, now_ms: int, *, refused: bool) -> list[str]:
    return told(sessions.probed(id_, 10 + id_, refused=refused, now_ms=now_ms))


def test_a_broken_stream_and_a_refused_port_fence_at_once() -> None:
    sessions = three_sessions()
    assert told(sessions.ended(10, 1000)) == ["probe 0"]
    assert answer(sessions, 0, 1001, refused=True) == ["fence 0"]
    assert sessions.connected == {1, 2}


def test_a_broken_stream_whose_port_answers_is_fenced_after_the_grace() -> None:
    sessions = three_sessions()
    sessions.tick(1000)
    sessions.ended(10, 1000)
    assert answer(sessions, 0, 1001, refused=False) == []
    assert run_until(sessions, 1050, 1500) == ["1300: fence 0"]


def test_a_dying_process_whose_port_closes_late_is_found_by_the_next_probe() -> None:
    sessions = three_sessions()
    sessions.ended(10, 1000)
    answer(sessions, 0, 1001, refused=False)
    assert told(sessions.tick(1050)) == []
    assert told(sessions.tick(1060)) == ["probe 0"]
    assert answer(sessions, 0, 1061, refused=True) == ["fence 0"]


def test_the_same_process_that_comes_back_within_the_grace_is_not_fenced() -> None:
    sessions = three_sessions()
    sessions.ended(10, 1000)
    answer(sessions, 0, 1001, refused=False)
    assert sessions.opened(20, broker(0), 1200) == []
    assert run_until(sessions, 1250, 3000) == []
    assert sessions.connected == {0, 1, 2}


def test_of_several_streams_that_end_together_only_refused_ones_are_fenced_before_the_time_out() -> None:
    sessions = three_sessions()
    sessions.tick(1000)
    for id_ in range(3):
        sessions.ended(10 + id_, 1000 + id_)
    assert answer(sessions, 1, 1010, refused=True) == ["fence 1"]
    answer(sessions, 0, 1010, refused=False)
    answer(sessions, 2, 1010, refused=False)
    assert run_until(sessions, 1050, 8950) == ["1300: brokers [0] are in doubt", "1350: brokers [2] are in doubt"]
    assert run_until(sessions, 9000, 9000) == ["9000: fence 0 2"]


def test_one_of_several_that_turns_out_to_be_gone_later_is_fenced_then() -> None:
    sessions = three_sessions()
    sessions.tick(1000)
    sessions.ended(10, 1000)
    sessions.ended(11, 1000)
    answer(sessions, 0, 1010, refused=False)
    answer(sessions, 1, 1010, refused=False)
    assert run_until(sessions, 1050, 2000) == ["1300: brokers [0, 1] are in doubt"]
    assert answer(sessions, 0, 2010, refused=True) == ["fence 0"]


def test_a_controller_that_was_late_itself_does_not_blame_the_broker() -> None:
    sessions = three_sessions()
    sessions.tick(1000)
    sessions.ended(10, 1000)
    answer(sessions, 0, 1001, refused=False)
    assert told(sessions.tick(2000)) == ["brokers [0] are in doubt", "probe 0"]
    assert run_until(sessions, 2050, 5000) == []


def test_a_controller_that_slept_through_the_time_out_gives_everybody_that_time_back() -> None:
    sessions = three_sessions()
    sessions.tick(1000)
    assert sessions.tick(60_000) == []
    assert run_until(sessions, 60_050, 67_900) == []
    assert run_until(sessions, 68_000, 68_000)[0] == "68000: fence 0 1 2"


def test_a_controller_that_is_late_every_time_still_fences_a_silent_broker_and_nobody_else() -> None:
    """Story: each write of the metadata took half a second, and there was always one. A hung broker led for hours."""
    sessions = three_sessions()
    sessions.tick(0)
    fences = []
    for now in range(500, 60_000, 500):
        for id_ in (1, 2):
            sessions.heartbeat(10 + id_, 5, now - 100)
        fences += [f"{now}: {effect}" for effect in told(sessions.tick(now))]
    assert fences == ["10500: fence 0", "10500: close 10"]


def test_a_silent_broker_is_fenced_at_the_session_time_out_counted_from_the_receipt() -> None:
    sessions = three_sessions()
    for now in range(0, 5001, 250):
        sessions.tick(now)
        for id_ in (1, 2):
            sessions.heartbeat(10 + id_, 5, now)
    sessions.heartbeat(10, 5, 3000)
    for id_ in (1, 2):
        sessions.heartbeat(10 + id_, 5, 20_000)
    assert run_until(sessions, 5050, 12_500) == ["12000: fence 0", "12000: close 10"]


def test_sparks_loss_signal_fences_its_launch_and_no_other() -> None:
    sessions = three_sessions()
    assert told(sessions.lost(2)) == ["fence 1", "close 11"]
    assert told(sessions.lost(2)) == []
    assert told(sessions.lost(77)) == []
    assert sessions.connected == {0, 2}


def test_a_probe_of_an_earlier_stream_says_nothing_about_the_new_one() -> None:
    sessions = three_sessions()
    sessions.ended(10, 1000)
    sessions.opened(20, broker(0, launch=9, epoch=50), 1100)
    assert told(sessions.probed(0, 10, refused=True, now_ms=1200)) == []
    assert 0 in sessions.connected


def test_a_broker_that_may_stop_is_fenced_as_soon_as_its_stream_ends() -> None:
    sessions = three_sessions()
    session = sessions.of_broker(0)
    assert isinstance(session, Session)
    sessions.may_stop(session)
    assert told(sessions.ended(10, 1000)) == ["fence 0"]


def test_a_heartbeat_of_a_session_that_is_over_counts_for_nothing() -> None:
    sessions = three_sessions()
    sessions.lost(1)
    assert sessions.heartbeat(10, 5, 100) is None
    sessions.ended(11, 100)
    assert sessions.heartbeat(11, 5, 100) is None


def test_every_state_but_the_last_can_be_left_by_loss_and_time_out() -> None:
    for state in SessionState:
        if state is not SessionState.FENCED:
            assert TRANSITIONS[state, Signal.SPARK_LOST] is SessionState.FENCED
            assert TRANSITIONS[state, Signal.TIMED_OUT] is SessionState.FENCED


def test_a_transition_that_the_table_does_not_have_is_a_bug() -> None:
    session = Session(1, 0, 1, 1, "h", 1, 100, state=SessionState.FENCED)
    with pytest.raises(InvariantError):
        session.move(Signal.HEARTBEAT)
