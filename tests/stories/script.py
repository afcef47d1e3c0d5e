"""A story: prose, commands, and the trace that follows each of them.

    # A heading, and what the story shows.

    > fetch 2
      2 asks 1 from 0
      2: high watermark 1

Lines that begin with `#` are prose, those with `> ` are commands. What is indented is the trace: it is compared, or
written.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from spark_broker.errors import InvariantError, SparkBrokerError

COMMAND, TRACE = "> ", "  "


class Stage:
    """Plays commands. `fetch 2 3 batches=1` calls `do_fetch("2", "3", batches="1")`, which says what happens."""

    def __init__(self) -> None:
        self._trace: list[str] = []

    def say(self, line: str) -> None:
        """The next line of the trace."""
        self._trace.append(line)

    def play(self, command: str) -> list[str]:
        """The trace of the command; an error that it meets is a part of that."""
        verb, *rest = command.split()
        words = [word for word in rest if "=" not in word]
        options = dict(word.split("=", 1) for word in rest if "=" in word)
        action = getattr(self, f"do_{verb.replace('-', '_')}")
        inspect.signature(action).bind(*words, **options)
        self._trace = []
        try:
            action(*words, **options)
        except InvariantError:
            raise
        except SparkBrokerError as error:
            self.say(f"{type(error).__name__}: {error.message}")
        self.after()
        return self._trace

    def after(self) -> None:
        """Say what has changed, and check what must hold."""


def perform(story: str, stage: Stage) -> str:
    """The story, with the trace that its commands give now."""
    return "\n".join(_performed(story.splitlines(), stage)) + "\n"


def _performed(lines: list[str], stage: Stage) -> Iterator[str]:
    for line in lines:
        if line.startswith(TRACE):
            continue
        yield line
        if line.startswith(COMMAND):
            yield from (TRACE + said for said in stage.play(line.removeprefix(COMMAND)))
