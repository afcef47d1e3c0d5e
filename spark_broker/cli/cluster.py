"""`spark-broker cluster`: start, status, stop."""

from __future__ import annotations

import re
from collections import Counter
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import msgspec
import typer

import spark_broker
from spark_broker.cli.cluster_process import Application, log_file, run_in_foreground, start_detached
from spark_broker.cli.cluster_state import (
    WAIT_MAX_S,
    ClusterState,
    cluster_command,
    data_directory,
    default_state_file,
    end_process,
    remove_note,
    running_cluster,
)
from spark_broker.cli.health import Health, health
from spark_broker.cli.options import Bootstrap, OutputFormat, OutputOption, StateFile, parse_settings
from spark_broker.cli.output import counted, fail, note, print_json, print_table
from spark_broker.config import load_cluster_settings
from spark_broker.errors import InvalidDataError
from spark_broker.model import BrokerInfo, ClusterDescription, PartitionInfo


class LogLevel(StrEnum):
    """The levels of `log.level`."""

    DEBUG = "DEBUG"
    INFO = "INFO"
    WARNING = "WARNING"
    ERROR = "ERROR"


_NAME = re.compile(r"[A-Za-z0-9._-]{1,100}(?<!\.)")
"""It becomes the name of a directory."""

cluster = typer.Typer(help="Start a cluster on this machine, look at one, stop it.", no_args_is_help=True)


class BrokerRow(msgspec.Struct, frozen=True):
    """A broker and its share of the partitions."""

    broker: BrokerInfo
    leads: int
    replicas: int
    in_sync: int


class Places(msgspec.Struct, frozen=True):
    """How clients reach a cluster, and where its data and its driver's log are. Empty: not known here."""

    bootstrap_servers: str
    log_dirs: str
    metadata_dir: str
    driver_log: str

    @classmethod
    def of(cls, cluster: ClusterDescription, state: ClusterState | None) -> Places:
        """`state`: what its driver noted, if it runs on this machine. Else brokers say where their directories are."""
        servers = ",".join(broker.address for broker in cluster.brokers if not broker.fenced)
        if state is not None:
            return cls(servers, state.log_dirs, state.metadata_dir, state.driver_log)
        parents = {str(Path(broker.directory).parent) for broker in cluster.brokers if broker.directory}
        return cls(servers, ",".join(sorted(parents)), "", "")


@cluster.command()
def start(
    brokers: Annotated[int, typer.Option(min=1, help="Brokers to start, one per executor.")] = 3,
    master: Annotated[str, typer.Option(help="Spark master. Default: a local-cluster of as many executors.")] = "",
    config: Annotated[Path | None, typer.Option(help="File of settings, like conf/cluster.toml.")] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="A setting.")] = None,
    conf: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="A setting of Spark.")] = None,
    log_level: Annotated[
        LogLevel | None, typer.Option(case_sensitive=False, help="Level of the logs (the setting log.level).")
    ] = None,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="Start though another cluster that lives uses the directories; end it.")
    ] = False,
    accept_older_metadata: Annotated[
        bool,
        typer.Option(
            "--accept-older-metadata",
            help="Start though metadata.dir lacks what brokers have seen (`spark-broker docs backup`).",
        ),
    ] = False,
    name: Annotated[
        str, typer.Option(help="Name of a detached cluster. It keeps its data in a directory of this name.")
    ] = "default",
    temporary: Annotated[
        bool, typer.Option("--temporary", help="With --detach: delete the data when the cluster stops.")
    ] = False,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return once the cluster is up.")] = False,
    timeout: Annotated[
        int, typer.Option(min=1, max=WAIT_MAX_S, metavar="SECONDS", help="How long --detach waits for the cluster.")
    ] = 240,
    state_file: StateFile = None,
) -> None:
    """Start a cluster: a Spark application whose executors are brokers. Runs until Ctrl-C, or in the background."""
    path = state_file or default_state_file()
    existing = running_cluster(path)
    if existing is not None:
        fail(f"a cluster runs already (pid {existing.driver_pid}): {cluster_command('stop', state_file)} ends it")
    if config and settings:
        fail("give --config or --set, not both")
    # A mistake shows now, not after Spark has started.
    loaded = load_cluster_settings(config or parse_settings(settings))
    if not _NAME.fullmatch(name):
        fail(f"--name {name!r}: letters, digits, '.', '_' and '-'")
    keeps = detach and not temporary and not loaded.cluster.log_dirs
    application = Application(
        brokers=brokers,
        master=master,
        settings={**loaded.cluster.given(), **loaded.topic.given()},  # A pipe can be read once.
        spark_settings=parse_settings(conf),
        log_level=log_level.value if log_level else "",
        take_over=take_over,
        accept_older_metadata=accept_older_metadata,
        data_dir=data_directory(name) if keeps else None,
        ready_file=path,
    )
    if not detach:
        run_in_foreground(application)
    state = start_detached(application, timeout)
    print_cluster(state.bootstrap_servers, OutputFormat.TABLE, state)
    if application.data_dir is not None:
        note(f"Its data is kept in {application.data_dir} (--temporary: not; --name: another one).")
    note(f"Stop it with {cluster_command('stop', state_file)}.")


@cluster.command()
def status(
    bootstrap_server: Bootstrap = "", output: OutputOption = OutputFormat.TABLE, state_file: StateFile = None
) -> None:
    """Show the brokers, what each of them leads and holds, and what the cluster suffers from.

    Status 1 when no cluster runs, when a broker is fenced, and when a partition is offline, under-replicated or under
    min.insync.replicas.
    """
    path = state_file or default_state_file()
    state = _noted(path, needed=not bootstrap_server)
    if not bootstrap_server:
        if state is None:
            fail(f"no cluster runs here ({path}): {cluster_command('start', state_file)}, or give --bootstrap-server")
        bootstrap_server = state.bootstrap_servers
    if not print_cluster(bootstrap_server, output, state).well:
        raise typer.Exit(1)


def _noted(path: Path, *, needed: bool) -> ClusterState | None:
    """The cluster that the file notes. Raises InvalidDataError for another file, if the note is needed."""
    try:
        return running_cluster(path)
    except InvalidDataError:
        if needed:
            raise
        return None


@cluster.command()
def stop(
    timeout: Annotated[
        int, typer.Option(min=0, max=WAIT_MAX_S, metavar="SECONDS", help="How long to wait for its end.")
    ] = 60,
    state_file: StateFile = None,
) -> None:
    """Stop the cluster that `cluster start` started: brokers hand over, sync and leave."""
    path = state_file or default_state_file()
    state = running_cluster(path)
    if state is None:
        stays = remove_note(path)
        fail(f"no cluster runs here ({path}){'; ' if stays else ''}{stays}")
    note(f"stopping cluster {state.cluster_id} (pid {state.driver_pid}) ...")
    if not end_process(state.driver_pid, timeout):
        fail(f"the driver (pid {state.driver_pid}) still runs after {timeout} s; look at {log_file(path)}")
    remove_note(path, state)
    note(f"stopped; {_becomes_of_data(state)}")


def _becomes_of_data(state: ClusterState) -> str:
    """What becomes of it. It is on the executors' machines: that this one has no such directory says nothing."""
    if state.temporary is None:
        return f"its data is in {state.log_dirs} on the executors' machines, unless it was temporary"
    if not state.temporary:
        return f"its data is kept in {state.log_dirs}"
    left = Path(state.log_dirs).is_dir()
    return f"its data was temporary, but {state.log_dirs} is left" if left else "its data was temporary and is deleted"


def print_cluster(bootstrap: str, output: OutputFormat, state: ClusterState | None) -> Health:
    """Describe the cluster at these addresses. `state`: the note of a driver that runs here, perhaps of another one."""
    with spark_broker.Admin(bootstrap) as admin:
        cluster = admin.describe_cluster(include_fenced=True)
        topics = admin.describe_topics(include_internal=True)
    partitions = [partition for topic in topics for partition in topic.partitions]
    rows = broker_rows(cluster, partitions)
    found = health(cluster, topics)
    is_noted = state is not None and (state.bootstrap_servers == bootstrap or state.cluster_id == cluster.cluster_id)
    places = Places.of(cluster, state if is_noted else None)
    if output is OutputFormat.JSON:
        described = {"cluster_id": cluster.cluster_id, "controller_epoch": cluster.controller_epoch}
        described |= msgspec.structs.asdict(places)
        print_json({**described, "controller": cluster.controller, "health": found, "brokers": rows})
        return found
    columns = ("broker", "address", "executor", "executor pid", "pid", "leads", "replicas", "in sync", "state")
    cells = [
        (
            *(row.broker.id, row.broker.address, row.broker.executor_id, row.broker.executor_pid, row.broker.pid),
            *(row.leads, row.replicas, row.in_sync, "fenced" if row.broker.fenced else "live"),
        )
        for row in rows
    ]
    size = f"{counted(len(topics), 'topic', 'topics')}, {counted(len(partitions), 'partition', 'partitions')}"
    title = f"cluster {cluster.cluster_id}: {size}"
    print_table(columns, cells, title=title, right=columns[3:8])
    print_where(cluster, places.driver_log)
    print_settings(places, found)
    return found


def print_settings(places: Places, found: Health) -> None:
    """Print how clients reach the cluster, where its data is, and what it suffers from."""
    unknown = "not known here; ask on the driver's machine"
    typer.echo(f"bootstrap.servers = {places.bootstrap_servers}")
    typer.echo(f"log.dirs = {places.log_dirs or unknown}")
    typer.echo(f"metadata.dir = {places.metadata_dir or unknown}")
    typer.echo(f"health: {found}{'' if found.well else ' (`spark-broker doctor` says which)'}")


def print_where(cluster: ClusterDescription, driver_log: str) -> None:
    """Print where the controller runs, and the log of each process."""
    unknown = "the terminal or pipe that it was started with"
    logs = [("driver and controller", driver_log or unknown)]
    logs += [
        (f"broker {broker.id}, executor {broker.executor_id}", broker.log or unknown) for broker in cluster.brokers
    ]
    print_table(("process", "its log"), logs, title=f"controller: {cluster.controller}")


def broker_rows(description: ClusterDescription, partitions: list[PartitionInfo]) -> list[BrokerRow]:
    """Each broker's share of these partitions."""
    leads = Counter(partition.leader for partition in partitions)
    replicas = Counter(broker for partition in partitions for broker in partition.replicas)
    in_sync = Counter(broker for partition in partitions for broker in partition.isr)
    return [
        BrokerRow(broker, leads[broker.id], replicas[broker.id], in_sync[broker.id]) for broker in description.brokers
    ]
