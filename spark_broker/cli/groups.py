"""`spark-broker groups`: list, describe, delete, delete-offsets. `seek` is in `group_seek`."""

from __future__ import annotations

import sys
from enum import StrEnum
from typing import Annotated

import typer

from spark_broker.cli.group_seek import seek
from spark_broker.cli.options import Bootstrap, Group, OutputFormat, OutputOption, open_admin
from spark_broker.cli.output import confirm, dashed, note, print_error, print_json, print_table
from spark_broker.cli.partition_lists import chosen_partitions, listed
from spark_broker.group_model import GroupDescription, GroupOffset
from spark_broker.times import shown

groups = typer.Typer(help="List, describe, move and delete consumer groups.", no_args_is_help=True)
groups.command()(seek)


class State(StrEnum):
    """Of a group: `GROUP_STATES`."""

    EMPTY = "Empty"
    ASSIGNING = "Assigning"
    RECONCILING = "Reconciling"
    STABLE = "Stable"


@groups.command("list")
def list_groups(
    state: Annotated[
        list[State] | None, typer.Option(case_sensitive=False, help="Only groups in this state. May be repeated.")
    ] = None,
    bootstrap_server: Bootstrap = "",
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """List the consumer groups of the cluster, and the state of each."""
    with open_admin(bootstrap_server) as admin:
        found = admin.list_groups([each.value for each in state] if state else None)
    if output is OutputFormat.JSON:
        print_json(found)
        return
    rows = [(group.group_id, group.state, group.members, group.coordinator) for group in found]
    print_table(("group", "state", "members", "coordinator"), rows, right=("members", "coordinator"))
    if not found and sys.stdout.isatty():
        none = f"No group is {' or '.join(state)}" if state else "There are no groups"
        note(f"{none}: a consumer with a group_id makes one.")


@groups.command()
def describe(
    group: Group,
    members: Annotated[bool, typer.Option("--members", help="Only the members, and what each has.")] = False,
    offsets: Annotated[bool, typer.Option("--offsets", help="Only the offsets, and the lag of each.")] = False,
    state: Annotated[bool, typer.Option("--state", help="Only the state, and the last rebalances.")] = False,
    bootstrap_server: Bootstrap = "",
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Show a group: its state and last rebalances, its members, its offsets and their lag."""
    everything = not (members or offsets or state)
    with open_admin(bootstrap_server) as admin:
        description = admin.describe_group(group)
        positions = list(admin.group_offsets(group).values()) if offsets or everything else []
    if output is OutputFormat.JSON:
        document: dict[str, object] = {"group_id": group}
        document |= _state_json(description) if state or everything else {}
        document |= {"members": description.members} if members or everything else {}
        document |= {"offsets": [_offset_json(offset) for offset in positions]} if offsets or everything else {}
        print_json(document)
        return
    if state or everything:
        _print_state(description)
    if members or (everything and description.members):
        _print_members(description)
    if offsets or everything:
        _print_offsets(group, positions)


@groups.command()
def delete(
    group: Annotated[list[str], typer.Argument(help="Ids of groups without members.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    bootstrap_server: Bootstrap = "",
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Delete groups and their committed offsets. Status 1 when one was not deleted. Asks first on a terminal."""
    confirm(f"Delete the committed offsets of {', '.join(group)}?", yes=yes)
    with open_admin(bootstrap_server) as admin:
        results = admin.delete_groups(group)
    if output is OutputFormat.JSON:
        print_json(
            [
                {"group_id": name, "error": error and error.name, "message": error.message if error else ""}
                for name, error in results.items()
            ]
        )
    else:
        for name, error in results.items():
            if error is None:
                note(f"deleted group {name}")
            else:
                print_error(str(error))
    if any(results.values()):
        raise typer.Exit(1)


@groups.command()
def delete_offsets(
    group: Group,
    topic: Annotated[list[str], typer.Option(metavar="TOPIC[:PARTITIONS]", help="`t` or `t:0,3-5`. May be repeated.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    bootstrap_server: Bootstrap = "",
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Delete what a group has committed of topics that no member reads. Asks first on a terminal."""
    confirm(f"Delete the offsets that group {group} has committed of {', '.join(topic)}?", yes=yes)
    with open_admin(bootstrap_server) as admin:
        partitions = chosen_partitions(admin, topic)
        before = {tp: offset.committed for tp, offset in admin.group_offsets(group, partitions).items()}
        admin.delete_group_offsets(group, partitions)
    deleted = {tp: offset for tp, offset in before.items() if offset is not None}
    if output is OutputFormat.JSON:
        rows = [{"topic": tp.topic, "partition": tp.partition, "committed": at} for tp, at in deleted.items()]
        print_json(rows)
    elif deleted:
        note(f"deleted the offsets that group {group} had committed of {listed(deleted)}")
    else:
        note(f"group {group} had committed nothing there")


def _print_state(group: GroupDescription) -> None:
    behind = (
        "" if group.target_epoch == group.epoch else f", partitions are being assigned (last for {group.target_epoch})"
    )
    rows: list[tuple[str, object]] = [
        ("state", group.state),
        ("members", len(group.members)),
        ("epoch", f"{group.epoch}{behind}"),
        ("assignor", group.assignor or "-"),
        ("coordinator", f"broker {group.coordinator} (leader epoch {group.coordinator_epoch})"),
    ]
    print_table(("", ""), rows, title=f"group {group.group_id}")
    if group.rebalances:
        last = [(each.epoch, shown(each.time), each.reason) for each in group.rebalances]
        print_table(("epoch", "began", "because"), last, title="last rebalances", right=["epoch"])


def _print_members(group: GroupDescription) -> None:
    """Columns that would be empty in every row are left out."""
    rows = [
        {
            "member": member.member_id,
            "instance": member.instance_id or "",
            "client": member.client_id,
            "host": member.host,
            "epoch": "-" if member.epoch < 0 else str(member.epoch),
            "kind": member.kind,
            "partitions": listed(member.assigned),
            "gives up": listed(member.revoking) if member.revoking else "",
            "waits for": listed(waiting) if (waiting := {*member.target} - {*member.assigned}) else "",
        }
        for member in group.members
    ]
    always = ("member", "epoch", "kind", "partitions")
    columns = [name for name in rows[0] if name in always or any(row[name] for row in rows)] if rows else always
    print_table(columns, [[row[name] or "-" for name in columns] for row in rows], title="members", right=["epoch"])


def _print_offsets(group_id: str, offsets: list[GroupOffset]) -> None:
    if not offsets:
        note(f"group {group_id} has committed nothing, and has no partitions")
        return
    members = any(offset.member_id for offset in offsets)
    columns = ["topic", "partition", "committed", "end", "lag", *(["member"] if members else [])]
    rows = [
        (offset.topic, offset.partition, dashed(offset.committed), dashed(offset.end_offset), dashed(offset.lag))
        + ((offset.member_id or "-",) if members else ())
        for offset in offsets
    ]
    print_table(columns, rows, title="offsets", right=columns[1:5])


def _state_json(group: GroupDescription) -> dict[str, object]:
    return {
        "state": group.state,
        "epoch": group.epoch,
        "target_epoch": group.target_epoch,
        "assignor": group.assignor,
        "coordinator": group.coordinator,
        "coordinator_epoch": group.coordinator_epoch,
        "rebalances": group.rebalances,
    }


def _offset_json(offset: GroupOffset) -> dict[str, object]:
    return {
        "topic": offset.topic,
        "partition": offset.partition,
        "committed": offset.committed,
        "leader_epoch": offset.leader_epoch,
        "metadata": offset.metadata,
        "start_offset": offset.start_offset,
        "end_offset": offset.end_offset,
        "lag": offset.lag,
        "member_id": offset.member_id,
    }
