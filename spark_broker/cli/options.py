"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import spark_broker
from spark_broker.cli.cluster_state import default_state_file, running_cluster
from spark_broker.errors import InvalidConfigError
from spark_broker.setting_values import named_once

if TYPE_CHECKING:
    from spark_broker.client.admin import Admin

BOOTSTRAP_VARIABLE = "SPARK_BROKER_BOOTSTRAP_SERVERS"


class OutputFormat(StrEnum):
    """What a command prints: a table for people, JSON for scripts."""

    TABLE = "table"
    JSON = "json"


Bootstrap = Annotated[
    str,
    typer.Option(
        "--bootstrap-server",
        "--bootstrap-servers",
        "-b",
        envvar=BOOTSTRAP_VARIABLE,
        metavar="HOST:PORT,...",
        help="Brokers to ask first; any one is enough. Default: the cluster that `cluster start` started here.",
    ),
]
OutputOption = Annotated[OutputFormat, typer.Option("--output", "-o", help="Print a table, or JSON for scripts.")]
Topic = Annotated[str, typer.Argument(help="Name of the topic.")]
Group = Annotated[str, typer.Argument(help="Id of the group.")]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--config", "-c", metavar="NAME=VALUE", help="A setting; may be repeated (`spark-broker docs configuration`)."
    ),
]
StateFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Note of the cluster that runs. Default: in the user's state directory."),
]


def bootstrap_servers(given: str) -> str:
    """The addresses given, else those of the cluster that was started here. Raises InvalidConfigError."""
    if given:
        return given
    state = running_cluster(default_state_file())
    if state is None:
        raise InvalidConfigError(
            "no cluster is named, and none was started here",
            hint=f"Give --bootstrap-server, set {BOOTSTRAP_VARIABLE}, or start one: `spark-broker cluster start`.",
        )
    return state.bootstrap_servers


def reading_settings(given: Iterable[str] | None) -> dict[str, str]:
    """`parse_settings`, of a command that reads to an end. Records that are deleted meanwhile do not make it skip the
    rest.
    """
    return {"auto.offset.reset": "earliest", **parse_settings(given)}


def open_admin(given: str) -> Admin:
    """An Admin of these brokers, else of the cluster that was started here. Raises InvalidConfigError.

    The client's modules are loaded only once there are addresses to connect to.
    """
    servers = bootstrap_servers(given)
    return spark_broker.Admin(servers)


def parse_settings(given: Iterable[str] | None) -> dict[str, str]:
    """`NAME=VALUE` strings as a mapping. Raises InvalidConfigError."""
    return named_once(_parsed(setting) for setting in given or ())


def _parsed(setting: str) -> tuple[str, str]:
    name, equals, value = setting.partition("=")
    if not equals or not name.strip():
        raise InvalidConfigError(f"{setting!r} is not NAME=VALUE", hint="Write it like `retention.ms=60000`.")
    return name.strip(), value.strip()
