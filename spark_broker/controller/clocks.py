"""Which wall clocks are wrong: heartbeats show the brokers' clocks, and each clock gets a verdict.

    RIGHT   near most clocks
    OFF     further than `warn_ms` from them, or from the controller's where no majority agrees: it is noted
    WRONG   further than `fence_ms` from a majority that agrees: the broker is fenced, until it is within `warn_ms`

Records get their time from the leader's clock, and retention compares it with the clock of a later leader. The
controller's clock counts like any other and may itself be wrong. The majority decides, so only a minority is ever
fenced. Where no majority agrees (one broker alone, two halves), it is unknown which clock is wrong.

Two messages bound a skew, whatever their delays. A heartbeat was sent before it was received, so it shows how far the
broker's clock is ahead at least. The controller's previous answer showed how far it is ahead at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from spark_broker.controller.effects import FenceBrokers, Note, SessionEffect
from spark_broker.controller.events import HeartbeatReceived


class Verdict(Enum):
    RIGHT = auto()
    OFF = auto()
    WRONG = auto()


@dataclass(frozen=True, slots=True)
class ClockBounds:
    """Distances from most clocks, in milliseconds."""

    warn_ms: int
    fence_ms: int


def measured_skew_ms(at_least_ms: int, at_most_ms: int, error_max_ms: int) -> int | None:
    """The middle of the interval; None where its error may exceed `error_max_ms`.

    A clock that was set between the two messages gives an interval that is wide, or ends before it begins.
    """
    if abs(at_most_ms - at_least_ms) > 2 * error_max_ms:
        return None
    return (at_least_ms + at_most_ms) // 2


def agreed_ms(skews_ms: Sequence[int], within_ms: int) -> int | None:
    """The median, if more than half of the clocks are within `within_ms` of it; None if no majority agrees.

    Of an even number of clocks, the median is the one of the middle two that is nearer to the controller's clock (0).
    """
    middle = sorted(skews_ms)[(len(skews_ms) - 1) // 2 : len(skews_ms) // 2 + 1]
    median = min(middle, key=abs)
    agreeing = sum(abs(skew - median) <= within_ms for skew in skews_ms)
    return median if 2 * agreeing > len(skews_ms) else None


def judge(before: Verdict, distance_ms: int, bounds: ClockBounds, *, agreed: bool) -> Verdict:
    """The verdict on a clock at this distance from the majority (`agreed`), or else from the controller's clock.

    A clock leaves OFF or WRONG at a smaller distance than it enters: a clock near a bound must not flap.
    """
    if distance_ms > bounds.fence_ms and agreed:
        return Verdict.WRONG
    if before is Verdict.WRONG:
        return Verdict.WRONG if distance_ms > bounds.warn_ms else Verdict.RIGHT
    if before is Verdict.OFF:
        return Verdict.OFF if distance_ms > bounds.warn_ms // 2 else Verdict.RIGHT
    return Verdict.OFF if distance_ms > bounds.warn_ms else Verdict.RIGHT


class Clocks:
    """The clocks of the brokers that have sessions, as their heartbeats show them.

    `_skews_ms`: how far each clock is ahead of the controller's, by broker id. A verdict of WRONG lasts until the clock
    is right again or the session is over. It stays even if the brokers that formed the majority leave.
    """

    def __init__(self, bounds: ClockBounds) -> None:
        self._bounds = bounds
        self._skews_ms: dict[int, int] = {}
        self._verdicts: dict[int, Verdict] = {}
        self._reasons: dict[int, str] = {}
        self._own = Verdict.RIGHT
        self._offset_ms: int | None = None  # the controller's wall clock minus its steady one

    def is_wrong(self, broker_id: int) -> bool:
        return self._verdicts.get(broker_id) is Verdict.WRONG

    def reason(self, broker_id: int) -> str:
        """Why the broker's clock keeps it fenced; empty where it does not."""
        return self._reasons.get(broker_id, "")

    def forget(self, broker_id: int) -> None:
        """The broker's session is over, or begins."""
        for by_broker in (self._skews_ms, self._verdicts, self._reasons):
            by_broker.pop(broker_id, None)

    def heard(self, broker_id: int, event: HeartbeatReceived) -> list[SessionEffect]:
        """Take in the clock that a heartbeat shows. Returns the effects, which may concern any broker."""
        beat = event.heartbeat
        if event.wall_ms < 0 or beat.wall_ms < 0 or beat.ahead_max_ms is None:
            return []
        self._notice_step(event)
        skew_ms = measured_skew_ms(beat.wall_ms - event.wall_ms, beat.ahead_max_ms, self._bounds.warn_ms // 2)
        if skew_ms is None:
            return []
        self._skews_ms[broker_id] = skew_ms
        agreed = agreed_ms([0, *self._skews_ms.values()], self._bounds.fence_ms)
        effects = self._judge_own(agreed)
        for judged_id, skew in sorted(self._skews_ms.items()):
            effects += self._judge(judged_id, skew - (agreed or 0), agreed=agreed is not None)
        return effects

    def _notice_step(self, event: HeartbeatReceived) -> None:
        """Forget the skews from before the controller's clock was set: they must not be compared with later ones."""
        offset_ms = event.wall_ms - event.received_ms
        if self._offset_ms is not None and abs(offset_ms - self._offset_ms) > self._bounds.warn_ms:
            self._skews_ms.clear()
        self._offset_ms = offset_ms

    def _judge(self, broker_id: int, ahead_ms: int, *, agreed: bool) -> list[SessionEffect]:
        before = self._verdicts.get(broker_id, Verdict.RIGHT)
        verdict = self._verdicts[broker_id] = judge(before, abs(ahead_ms), self._bounds, agreed=agreed)
        if verdict is before:
            return []
        self._reasons.pop(broker_id, None)
        others = "most clocks of the cluster" if agreed else "the driver's, and no majority of clocks agrees"
        how = f"its clock is {_distance(ahead_ms)} {others}"
        match verdict:
            case Verdict.RIGHT:
                return [Note(f"broker {broker_id}: its clock is right again", expected=True)]
            case Verdict.OFF:
                return [Note(f"broker {broker_id}: {how}; set its machine's clock (NTP)")]
            case Verdict.WRONG:
                within = f"controller.clock.skew.warn.ms ({self._bounds.warn_ms})"
                self._reasons[broker_id] = (
                    f"{how}; set its machine's clock (NTP): it stays fenced until within {within}"
                )
                return [FenceBrokers((broker_id,), self._reasons[broker_id])]

    def _judge_own(self, agreed: int | None) -> list[SessionEffect]:
        """A wrong clock of the controller is only noted: no record gets its time from it."""
        before, bounds = self._own, self._bounds
        self._own = judge(before, abs(agreed or 0), bounds, agreed=False)
        if self._own is before:
            return []
        if self._own is Verdict.RIGHT:
            return [Note("the driver's clock is right again", expected=True)]
        return [Note(f"the driver's clock is {_distance(-(agreed or 0))} most brokers'; set its machine's clock (NTP)")]


def _distance(ahead_ms: int) -> str:
    return f"{abs(ahead_ms) / 1000:.1f} s {'ahead of' if ahead_ms > 0 else 'behind'}"
