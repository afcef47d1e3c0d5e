"""Stories of the protocol, as text: what happens is compared with what is written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from spark_broker.errors import InvariantError, NetworkError
from tests.stories.elections import ElectionStage
from tests.stories.replication import ReplicationStage
from tests.stories.script import Stage, perform
from tests.stories.transactions import TransactionStage

HERE = Path(__file__).parent

STAGES: dict[str, Callable[[], Stage]] = {
    "replication": ReplicationStage,
    "elections": ElectionStage,
    "transactions": TransactionStage,
}

STORIES = sorted(HERE.glob("*/*.txt"))


@pytest.mark.parametrize("path", STORIES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_what_happens_is_what_is_written(path: Path, pytestconfig: pytest.Config) -> None:
    written = path.read_text(encoding="utf-8")
    performed = perform(written, STAGES[path.parent.name]())
    if pytestconfig.getoption("--rewrite-stories", default=False):
        path.write_text(performed, encoding="utf-8")
    else:
        assert performed == written


def test_every_stage_has_stories_and_every_story_a_heading_and_a_trace() -> None:
    assert {path.parent.name for path in STORIES} == set(STAGES)
    for path in STORIES:
        lines = path.read_text(encoding="utf-8").splitlines()
        assert lines[0].startswith("# "), path
        assert any(line.startswith("  ") for line in lines), path


class Echo(Stage):
    """Repeats the words of a command."""

    def do_echo(self, *words: str, times: str = "1") -> None:
        for _ in range(int(times)):
            self.say(" ".join(words))

    def do_fail(self) -> None:
        raise NetworkError("connection refused")

    def do_break(self) -> None:
        raise InvariantError("cannot be")


STORY = """# A heading

> echo a b times=2
  a b
  a b

> fail
  NetworkError: connection refused
"""


def test_the_trace_is_written_under_its_command_and_all_else_is_kept() -> None:
    assert perform(STORY, Echo()) == STORY
    without = "\n".join(line for line in STORY.splitlines() if not line.startswith("  ")) + "\n"
    assert perform(without, Echo()) == STORY
    assert perform(STORY.replace("  a b\n", "  c\n", 1), Echo()) == STORY


@pytest.mark.parametrize(
    ("command", "error"), [("sing", AttributeError), ("echo loud=1", TypeError), ("break", InvariantError)]
)
def test_a_command_that_nobody_knows_and_a_bug_of_our_own_are_no_trace(command: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        perform(f"> {command}\n", Echo())
