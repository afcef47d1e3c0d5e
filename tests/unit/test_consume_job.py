"""The command line of `jobs/consume.py`: what goes together, and what becomes options of the read."""

from __future__ import annotations

import pytest

from jobs.consume import arguments, check, is_stream, read_options, target_of
from spark_broker.errors import InvalidConfigError

READ = ("--bootstrap-servers", "a:1", "--topic", "t")


def test_its_arguments_become_options_of_the_read() -> None:
    given = arguments([*READ, "--checkpoint", "c", "--group", "g", "--option", "maxOffsetsPerTrigger=10"])
    check(given)
    assert is_stream(given)
    assert target_of(given) == "the console"
    assert read_options(given) == {
        "bootstrap.servers": "a:1",
        "subscribe": "t",
        "startingOffsets": "earliest",
        "group": "g",
        "maxOffsetsPerTrigger": "10",
    }
    assert read_options(arguments([*READ, "--option", "startingOffsets=latest"]))["startingOffsets"] == "latest"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--to", "f", "--table", "t"], "not both"),
        (["--follow", "--mode", "append"], "for one run"),
        (["--every", "5"], "--every needs --follow"),
        (["--group", "g"], "has no progress"),
        (["--follow", "--to", "f"], "needs --checkpoint"),
    ],
)
def test_what_does_not_go_together_is_refused(given: list[str], message: str) -> None:
    with pytest.raises(InvalidConfigError, match=message):
        check(arguments([*READ, *given]))
