"""Twenty members share a topic while members and brokers are killed at random: `python -m tests.soak.sharing --help`.

At the end the group reads all that is left, and the checker judges: nothing lost, one owner at a time, nothing handed
out again that was committed.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from spark_broker.client.admin import Admin
from spark_broker.errors import SparkBrokerError
from spark_broker.model import NewTopic, TopicPartition
from spark_broker.testing.checker import check_history
from spark_broker.testing.client_thread import ClientThread
from spark_broker.testing.group_workload import Sharing
from spark_broker.testing.history import History, OffsetsCommitted, Polled, Revoked
from spark_broker.testing.history_file import save_history
from spark_broker.testing.member_process import MemberProcess
from spark_broker.testing.recorder import HistoryRecorder
from spark_broker.testing.report import explain
from spark_broker.testing.workload import RecordingWriter, snapshot_with_consumer
from tests.support.process_cluster import ProcessCluster
from tests.support.waiting import eventually

TOPIC, GROUP, PARTITIONS = "shared", "sharing", 24
BROKERS = 3
SHARING = Sharing(GROUP, (TOPIC,), session_timeout_ms=6000, max_poll_interval_ms=8000, leaves=0.02, freezes=0.01)
PATIENT = {"delivery.timeout.ms": 600_000, "max.block.ms": 600_000}
STOPS = 0.2
LOOK_S = 0.5
END_S = 240.0


class Report(msgspec.Struct):
    """What a run did and found. `handed_out_again`: records that came a second time, after unclean moves."""

    minutes: float
    seed: int
    members: int
    lives: int
    member_kills: int
    broker_kills: int
    clean_moves: int
    lost_moves: int
    commits: int
    records: int
    handed_out: int
    handed_out_again: int
    violations: dict[str, int]
    history: str = ""
    page: str = ""


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="tests.soak.sharing", description="A group under kills, judged at the end.")
    parser.add_argument("--minutes", type=float, default=30.0, metavar="N", help="how long (default 30)")
    parser.add_argument("--members", type=int, default=20, metavar="N", help="members, a process each (default 20)")
    parser.add_argument("--life", type=float, default=60.0, metavar="S", help="a member lives so long (default 60)")
    parser.add_argument("--kill-every", type=float, default=20.0, metavar="S", help="between kills of brokers (20)")
    parser.add_argument("--rate", type=float, default=200.0, metavar="N", help="records a second (default 200)")
    parser.add_argument("--seed", type=int, help="what the kills are drawn from (default: a new one, printed)")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="keep the history in this file")
    parser.add_argument("--output", choices=("table", "json"), default="table", help="what to print on stdout")
    options = parser.parse_args(given)
    if options.seed is None:
        options.seed = random.SystemRandom().randrange(1_000_000)
    return options


def soak(directory: Path, options: argparse.Namespace) -> Report:
    """Run, and judge."""
    recorder = HistoryRecorder()
    partitions = [TopicPartition(TOPIC, number) for number in range(PARTITIONS)]
    with ProcessCluster(directory, BROKERS, {"broker.session.timeout.ms": 3000}) as cluster:
        servers = cluster.bootstrap_servers
        with Admin(servers) as admin:
            admin.create_topic(NewTopic(TOPIC, PARTITIONS, BROKERS, config={"min.insync.replicas": 2}))
        seed, life_s = options.seed, options.life
        members = [
            MemberProcess(recorder, servers, SHARING, name=f"member-{n}", seed=seed, life_s=life_s, stops=STOPS)
            for n in range(options.members)
        ]
        rows = 5
        writer = RecordingWriter(
            recorder, servers, TOPIC, PARTITIONS, rows=rows, interval_s=rows / options.rate, settings=PATIENT
        )
        clients: list[RecordingWriter | ClientThread] = [writer, *members]
        with ExitStack() as running:
            for client in clients:
                running.enter_context(client)
            kills = _kill_brokers(cluster, options)
            writer.stop(END_S)
            committed = _read_the_rest(servers, partitions)
            for member in members:
                member.stop(END_S)
        for partition, offset in committed.items():
            recorder.offsets_committed(GROUP, partition, offset)
        snapshot_with_consumer(recorder, servers, partitions, timeout_s=END_S)
    return _report(recorder.history(), options, members, kills)


def _kill_brokers(cluster: ProcessCluster, options: argparse.Namespace) -> int:
    """One broker after the other, until the time is over. At the end all of them are live."""
    rng, pause, kills = random.Random(options.seed), threading.Event(), 0
    until_s = time.monotonic() + options.minutes * 60
    next_s = time.monotonic() + options.kill_every
    while time.monotonic() < until_s:
        pause.wait(LOOK_S)
        cluster.launch_ended()
        if time.monotonic() >= next_s and cluster.live_count() == BROKERS:
            os.kill(cluster.pid(rng.randrange(BROKERS)), signal.SIGKILL)
            kills += 1
            next_s = time.monotonic() + rng.uniform(0.3, 1.7) * options.kill_every
    cluster.launch_ended()
    cluster.await_live(BROKERS)
    return kills


def _read_the_rest(servers: str, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
    """Wait until the group has committed everything; returns where it stands then."""
    committed: dict[TopicPartition, int] = {}
    with Admin(servers) as admin:

        def is_all_read() -> bool:
            try:
                offsets = admin.group_offsets(GROUP, partitions)
            except SparkBrokerError:
                return False
            committed.update({tp: each.committed for tp, each in offsets.items() if each.committed is not None})
            return all(each.lag == 0 for each in offsets.values())

        eventually(is_all_read, END_S, "the group to commit everything")
    return committed


def _report(history: History, options: argparse.Namespace, members: Sequence[MemberProcess], kills: int) -> Report:
    result = check_history(history)
    revoked = Counter(event.lost for event in history.events if isinstance(event, Revoked))
    handed_out: Counter[bytes] = Counter()
    for event in history.events:
        if isinstance(event, Polled) and event.reader.startswith("member-"):
            handed_out.update(event.values)
    report = Report(
        minutes=options.minutes,
        seed=options.seed,
        members=options.members,
        lives=sum(member.lives for member in members),
        member_kills=sum(member.kills for member in members),
        broker_kills=kills,
        clean_moves=revoked[False],
        lost_moves=revoked[True],
        commits=sum(isinstance(event, OffsetsCommitted) for event in history.events),
        records=result.values_read,
        handed_out=len(handed_out),
        handed_out_again=handed_out.total() - len(handed_out),
        violations={kind.name: count for kind, count in result.counts().items()},
        page="" if result.ok else explain(history, result),
    )
    if options.keep is not None:
        save_history(history, options.keep)
        report.history = str(options.keep)
    return report


def main(given: list[str] | None = None) -> int:
    """Run and print; returns the exit status: 0 when nothing is wrong and every record was handed out."""
    options = arguments(given)
    with tempfile.TemporaryDirectory(prefix="spark-broker-soak-") as directory:
        report = soak(Path(directory), options)
    if options.output == "json":
        sys.stdout.write(msgspec.json.encode(report).decode() + "\n")
    else:
        table = Table("what", "how much", title=f"a group of {report.members} members, seed {report.seed}")
        for name, value in msgspec.structs.asdict(report).items():
            if name != "page":
                table.add_row(name.replace("_", " "), f"{value:,}" if isinstance(value, int) else str(value))
        Console(width=120).print(table)
        sys.stdout.write(report.page)
    return 0 if not report.violations and report.records == report.handed_out > 0 else 1


if __name__ == "__main__":
    sys.exit(main())
