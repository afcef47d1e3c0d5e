"""The command line of `jobs/produce.py`: what goes together, and what becomes options of the write."""

from __future__ import annotations

import pytest

from jobs.produce import arguments, check, write_options
from spark_broker.errors import InvalidConfigError

SERVERS = ("--bootstrap-servers", "a:1")


def test_its_arguments_become_options_of_the_write() -> None:
    given = arguments(
        [
            *SERVERS,
            *("--topic", "t", "--create", "--partitions", "6", "--topic-config", "key.columns=a,b"),
            *("--write-option", "compression.type=zstd", "--app-id", "daily", "--app-version", "7", "f.csv"),
        ]
    )
    check(given)
    assert given.paths == ["f.csv"]
    assert write_options(given) == {
        "bootstrap.servers": "a:1",
        "topic": "t",
        "createTopic": "true",
        "topic.partitions": "6",
        "topic.key.columns": "a,b",
        "txnAppId": "daily",
        "txnVersion": "7",
        "compression.type": "zstd",
    }
    assert write_options(arguments([*SERVERS, "--table", "x"])) == {"bootstrap.servers": "a:1"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "files, --table or --query"),
        (["f", "--table", "t"], "files, --table or --query"),
        (["--table", "t", "--checkpoint", "c"], "--checkpoint is for files"),
        (["f", "g", "--checkpoint", "c"], "one directory"),
        (["f", "--checkpoint", "c", "--app-id", "a"], "no --app-id"),
        (["f", "--follow"], "--follow needs --checkpoint"),
    ],
)
def test_what_does_not_go_together_is_refused(given: list[str], message: str) -> None:
    with pytest.raises(InvalidConfigError, match=message):
        check(arguments([*SERVERS, *given]))


def test_an_option_that_is_no_pair_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        arguments([*SERVERS, "--option", "header", "f"])
    assert "'header' is not NAME=VALUE" in capsys.readouterr().err
