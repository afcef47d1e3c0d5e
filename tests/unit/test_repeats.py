"""A line that would be logged again and again is logged once a second."""

from __future__ import annotations

import logging

from spark_broker.broker.repeats import MAX_LINES, Repeats


class Log:
    """A logger that keeps its lines. `now_s`: its clock."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._repeats = Repeats(lambda: self.now_s)
        self.lines: list[str] = []

    def say(self, text: str, *arguments: object) -> None:
        record = logging.LogRecord("logger", logging.INFO, "path", 1, text, arguments, None)
        if self._repeats.filter(record):
            self.lines.append(record.getMessage())


def test_a_line_is_never_written_twice_a_second_and_every_second_again() -> None:
    log = Log()
    for tenth in range(21):
        log.now_s = tenth / 10
        log.say("tried again: %s", "refused")
    assert log.lines == ["tried again: refused"] * 3


def test_other_words_are_another_line() -> None:
    log = Log()
    for partition in range(3):
        log.say("t-%d: rebuilt", partition)
    assert log.lines == ["t-0: rebuilt", "t-1: rebuilt", "t-2: rebuilt"]


def test_what_is_remembered_is_bounded() -> None:
    log = Log()
    for number in range(MAX_LINES + 1):
        log.say("line %d", number)
    log.say("line 0")
    log.say(f"line {MAX_LINES}")
    assert log.lines[-1] == "line 0", "the oldest was forgotten, and no other"
