"""The examples of the pages about clients run as they are printed, one after the other, on a cluster of their own."""

from __future__ import annotations

import inspect
import re
import runpy
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest

from spark_broker import Admin, Consumer, Producer
from spark_broker.cli.columns import parse_schema
from tests.client.fake_broker import FakeCluster
from tests.client.test_transactions import committed

RunPage = Callable[[str], list[str]]

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    cluster = FakeCluster(3)
    yield cluster
    cluster.close()
    assert [broker.bugs for broker in cluster.brokers] == [[], [], []]


def examples(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


@pytest.fixture
def run(cluster: FakeCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> RunPage:
    def run_page(page: str) -> list[str]:
        """What each example of the page printed."""
        printed = []
        for number, example in enumerate(examples(page, "python")):
            script = tmp_path / f"example_{number}.py"
            script.write_text(example)
            runpy.run_path(str(script), {"servers": cluster.bootstrap})
            printed.append(capsys.readouterr().out)
        return printed

    return run_page


@pytest.mark.slow
def test_the_examples_of_the_clients_do_what_the_page_says(run: RunPage, cluster: FakeCluster) -> None:
    produced, awaited, consumed, one_record, committed, described, failed = run("clients.md")
    assert produced.startswith("0\n[(")
    assert re.fullmatch(r"\(2, [1-9]\)", awaited.strip())
    assert sorted(re.findall(r"hello|hallo|salut", consumed)) == ["hallo", "hello", "salut"]
    assert re.fullmatch(r"[012] 0 20\S+ \S+ (None|b'\w+') b'(hello|hallo|salut)'", one_record.strip())
    first, position = committed.split()
    assert first == position
    assert described.splitlines()[0] == "['greetings']"
    assert failed.startswith("UNKNOWN_TOPIC_OR_PARTITION True ")


def test_the_examples_of_the_docstrings_run(
    cluster: FakeCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.create("greetings")
    printed = []
    for client in (Producer, Consumer, Admin):
        (example,) = re.findall(r"```python\n(.*?)```", inspect.getdoc(client) or "", re.DOTALL)
        script = tmp_path / f"{client.__name__}.py"
        script.write_text(f"from spark_broker import {client.__name__}\n{example}")
        runpy.run_path(str(script), {"servers": cluster.bootstrap})
        printed.append(capsys.readouterr().out)
    assert printed == ["2 2\n", "0 0 [b'hello', b'hallo']\n0 2 [b'salut']\n", "['greetings'] 3\n"]


def test_the_readmes_transaction_commits_records_and_offsets(cluster: FakeCluster, tmp_path: Path) -> None:
    for topic in ("orders", "audit", "inbox"):
        cluster.create(topic)
    script = tmp_path / "transaction.py"
    script.write_text(examples("../README.md", "python")[1])
    runpy.run_path(str(script), {"cluster": SimpleNamespace(bootstrap_servers=cluster.bootstrap)})
    assert cluster.committed["order-taker", "inbox", 0].offset == 42
    assert committed(cluster, "audit") == [["order 1 was taken"]]


def test_the_examples_of_typed_topics_do_what_the_page_says(run: RunPage, cluster: FakeCluster) -> None:
    created, changed, appended, read = run("typed-topics.md")
    assert changed == "1\n"
    assert cluster.topics["orders"].parsed_schemas[1].field("price").type == pa.decimal128(20, 2)
    assert "price: decimal128(10, 2)" in created
    partition, offset = appended.split()
    assert (int(partition) in range(3), offset) == (True, "0")
    assert read == f"{partition} 0 [{{'customer': 'ada', 'price': Decimal('9.99')}}]\n"


def test_the_columns_of_the_command_line_are_those_of_python(run: RunPage, cluster: FakeCluster) -> None:
    run("typed-topics.md")
    command, *_ = examples("typed-topics.md", "sh")
    words = shlex.split(command.replace("\\\n", " "))
    columns = [words[at + 1] for at, word in enumerate(words) if word == "--column"]
    schema: pa.Schema = cluster.topics["orders"].parsed_schemas[0]
    assert parse_schema(columns).equals(schema)


def test_every_type_of_the_table_of_types_is_taken() -> None:
    _, _, table = (DOCS / "typed-topics.md").read_text().partition("\n## Types\n")
    rows = re.findall(r"^\| [a-z ]+ \| (`.*?`) \|", table, re.MULTILINE)
    types = [kind for row in rows for kind in re.findall(r"`([^`]+)`", row)]
    assert len(types) >= 16
    assert len(parse_schema([f"c:{kind}" for kind in types])) == len(types)


def test_the_example_for_who_comes_from_kafka_does_what_the_page_says(run: RunPage, cluster: FakeCluster) -> None:
    (printed,) = run("from-kafka.md")
    assert printed == "b'user-1' b'{\"page\": \"/\"}'\n"


def test_what_the_page_about_groups_does_as_an_admin_is_what_it_says(
    cluster: FakeCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.create("clicks", 2)
    printed = []
    for number, example in enumerate(examples("groups.md", "python")):
        script = tmp_path / f"groups_{number}.py"
        script.write_text(example.replace("timeout=10.0", "timeout=0.1"))
        runpy.run_path(str(script), {"servers": cluster.bootstrap})
        printed.append(capsys.readouterr().out)
    assert printed[:-1] == ["", ""], "there are no records, and nothing was polled"
    assert printed[-1].splitlines() == [
        *("reports Empty 0", "visitors Empty 0", "[]", "visits-0 0 0 None", "visits-1 0 0 None"),
    ]
