"""`spark-broker groups seek`: other committed offsets for a group, shown first and set only with --execute."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spark_broker.cli.options import Bootstrap, Group, OutputFormat, OutputOption, open_admin
from spark_broker.cli.output import counted, dashed, note, print_json, print_table
from spark_broker.cli.partition_lists import chosen_partitions, listed
from spark_broker.digits import digits
from spark_broker.errors import (
    GroupIdNotFoundError,
    InvalidConfigError,
    InvalidDataError,
    LeaderNotAvailableError,
)
from spark_broker.group_model import GroupOffset
from spark_broker.model import TopicPartition
from spark_broker.times import parsed, shown

if TYPE_CHECKING:
    from spark_broker.client.admin import Admin

TARGETS = "--to-earliest, --to-latest, --to-offset, --to-datetime, --by-duration, --from-file, --to-group or --shift-by"

_HEADER = ["topic", "partition", "offset"]
_DURATION = re.compile(
    r"P(?:(?P<weeks>\d{1,9})W)?(?:(?P<days>\d{1,9})D)?"
    r"(?:T(?:(?P<hours>\d{1,9})H)?(?:(?P<minutes>\d{1,9})M)?(?:(?P<seconds>\d{1,9}(?:\.\d{1,6})?)S)?)?",
    re.IGNORECASE | re.ASCII,
)
_SHORT_DURATION = re.compile(r"(\d{1,9})([smhdw])", re.IGNORECASE | re.ASCII)
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


@dataclass(frozen=True)
class Target:
    """Where to: one of the fields but for `shift_by`, which may be given beside it, or alone."""

    earliest: bool = False
    latest: bool = False
    offset: int | None = None
    moment: datetime | None = None
    file: Path | None = None
    group: str | None = None
    shift_by: int | None = None

    @property
    def count(self) -> int:
        """How many of the fields are given, without `shift_by`."""
        others = (self.offset, self.moment, self.file, self.group)
        return self.earliest + self.latest + sum(value is not None for value in others)

    @property
    def is_exact(self) -> bool:
        """The offsets are the user's own: one that cannot be is an error. Others stop at the first or last record."""
        return self.shift_by is None and (self.offset is not None or self.file is not None)


@dataclass(frozen=True)
class Move:
    """A partition, as the group stands in it, and the offset that it is to have."""

    now: GroupOffset
    offset: int
    stopped: bool

    @property
    def lag(self) -> int | None:
        return self.now.lag_at(self.offset)


def seek(
    group: Group,
    to_earliest: Annotated[bool, typer.Option("--to-earliest", help="To the first record.")] = False,
    to_latest: Annotated[bool, typer.Option("--to-latest", help="To the end.")] = False,
    to_offset: Annotated[int | None, typer.Option(metavar="N", min=0, help="To this offset.")] = None,
    to_datetime: Annotated[
        str | None, typer.Option(metavar="TIME", help="To the first record from then on: 2026-01-31T12:00 (UTC).")
    ] = None,
    by_duration: Annotated[
        str | None, typer.Option(metavar="DURATION", help="To the first record of the last 90s, 15m, 2h, 1d; or PT2H.")
    ] = None,
    from_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", exists=True, dir_okay=False, help="Lines of topic,partition,offset."),
    ] = None,
    to_group: Annotated[str | None, typer.Option(metavar="GROUP", help="To what this group has committed.")] = None,
    shift_by: Annotated[
        int | None,
        typer.Option(metavar="N", help="Then N further, or back if negative. Alone: from what is committed."),
    ] = None,
    topic: Annotated[
        list[str] | None, typer.Option(metavar="TOPIC[:PARTITIONS]", help="`t` or `t:0,3-5`. May be repeated.")
    ] = None,
    all_topics: Annotated[bool, typer.Option("--all-topics", help="Every topic of the group.")] = False,
    execute: Annotated[bool, typer.Option("--execute", help="Do it. Without: only show what it would do.")] = False,
    bootstrap_server: Bootstrap = "",
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Move the committed offsets of a group that has no members. Shows what it would do, unless --execute is given."""
    moment = _moment(to_datetime, by_duration)
    target = Target(to_earliest, to_latest, to_offset, moment, from_file, to_group, shift_by)
    _check_options(target, topic or [], both_times=bool(to_datetime and by_duration), all_topics=all_topics)
    with open_admin(bootstrap_server) as admin:
        moves = _moves(admin, group, target, _partitions(admin, group, target, topic or [], all_topics=all_topics))
        members = 0
        if execute:
            admin.alter_group_offsets(group, {move.now.topic_partition: move.offset for move in moves})
        else:
            members = _members(admin, group)
    if output is OutputFormat.JSON:
        print_json({"group_id": group, "executed": execute, "offsets": [_json(move) for move in moves]})
    else:
        _print(group, moves, executed=execute)
    if moment is not None:
        note(f"to the first record from {shown(moment)} on")
    if members:
        note(
            f"The group has {counted(members, 'member', 'members')}. Stop its consumers first, or --execute is refused."
        )
    if not execute:
        note("This was a preview, and nothing was changed. Add --execute to do it.")


def _check_options(target: Target, topics: Sequence[str], *, both_times: bool, all_topics: bool) -> None:
    """Raises InvalidConfigError unless one target is named, and the partitions once."""
    alone = target.count == 0 and target.shift_by is not None
    if both_times or (target.count != 1 and not alone):
        raise InvalidConfigError("it is not said, or said twice, where to seek", hint=f"Give one of {TARGETS}.")
    named = bool(topics) + all_topics
    if target.file is not None and named:
        raise InvalidConfigError(
            "--from-file says itself which partitions", hint="Leave --topic and --all-topics out, or lines of the file."
        )
    if named > 1 or (named == 0 and target.file is None and target.group is None):
        raise InvalidConfigError(
            "it is not said, or said twice, which partitions are meant",
            hint="Give --topic TOPIC, --topic TOPIC:0,1 (may be repeated), or --all-topics.",
        )


def _moment(to_datetime: str | None, by_duration: str | None) -> datetime | None:
    """Raises InvalidConfigError."""
    if to_datetime is not None:
        try:
            return parsed(to_datetime)
        except ValueError:
            raise InvalidConfigError(
                f"--to-datetime {to_datetime!r} is no time", hint="Write it like 2026-01-31T12:00 (UTC)."
            ) from None
    if by_duration is None:
        return None
    try:
        return datetime.now(UTC) - parse_duration(by_duration)
    except OverflowError:
        raise InvalidConfigError(
            f"--by-duration {by_duration!r} goes back before the year 1", hint="Give --to-earliest."
        ) from None


def parse_duration(text: str) -> timedelta:
    """`90s`, `15m`, `2h`, `1d`, `1w`, or as in ISO 8601: `PT1H30M`, `P1DT12H`. Raises InvalidConfigError."""
    short = _SHORT_DURATION.fullmatch(text.strip())
    if short is not None:
        return timedelta(**{_UNITS[short[2].lower()]: int(short[1])})
    long = _DURATION.fullmatch(text.strip())
    amounts = {} if long is None else {unit: float(amount) for unit, amount in long.groupdict().items() if amount}
    if not amounts:
        raise InvalidConfigError(f"--by-duration {text!r} is no duration", hint="Write it like 15m, 2h, 1d or PT1H30M.")
    return timedelta(**amounts)


def _partitions(
    admin: Admin, group: str, target: Target, topics: Sequence[str], *, all_topics: bool
) -> list[TopicPartition] | None:
    """The partitions that are named; None: the file or the other group says which."""
    if all_topics:
        topics = sorted({tp.topic for tp in admin.group_offsets(group)})
        if not topics:
            raise GroupIdNotFoundError(f"group {group!r} has committed nothing", hint="Give --topic.")
    return chosen_partitions(admin, topics) if topics else None


def _moves(admin: Admin, group: str, target: Target, chosen: list[TopicPartition] | None) -> list[Move]:
    """The moves, in order. Raises OffsetOutOfRangeError, LeaderNotAvailableError, InvalidConfigError."""
    given = read_offsets(target.file) if target.file is not None else _committed_by(admin, target.group)
    partitions = sorted(given) if chosen is None else chosen
    offsets = admin.group_offsets(group, partitions)
    unanswered = next((tp for tp, offset in offsets.items() if offset.end_offset is None), None)
    if unanswered is not None:
        raise LeaderNotAvailableError(f"{unanswered} has no leader that answers: where its records end is not known")
    starts = _starts(admin, target, offsets, given)
    left_out = [tp for tp in partitions if starts.get(tp) is None]
    if len(left_out) == len(partitions):
        raise InvalidConfigError(
            f"there is no offset to move to for {listed(left_out)}", hint=f"Give one of {TARGETS}."
        )
    if left_out:
        note(f"nothing is committed for {listed(left_out)}: left out")
    shift = target.shift_by or 0
    return [_move(offsets[tp], start + shift, target) for tp in partitions if (start := starts.get(tp)) is not None]


def _committed_by(admin: Admin, group: str | None) -> dict[TopicPartition, int]:
    if group is None:
        return {}
    offsets = admin.group_offsets(group)
    return {tp: offset.committed for tp, offset in offsets.items() if offset.committed is not None}


def _starts(
    admin: Admin, target: Target, offsets: Mapping[TopicPartition, GroupOffset], given: Mapping[TopicPartition, int]
) -> Mapping[TopicPartition, int | None]:
    """Where each partition goes, before the shift; None, or no entry: nothing says where."""
    if target.file is not None or target.group is not None:
        return given
    if target.earliest:
        return {tp: offset.start_offset for tp, offset in offsets.items()}
    if target.latest:
        return {tp: offset.end_offset for tp, offset in offsets.items()}
    if target.offset is not None:
        return dict.fromkeys(offsets, target.offset)
    if target.moment is not None:
        found = admin.list_offsets(dict.fromkeys(offsets, target.moment))
        return {tp: offsets[tp].end_offset if at is None else at for tp, at in found.items()}
    return {tp: offset.committed for tp, offset in offsets.items()}


def _move(now: GroupOffset, offset: int, target: Target) -> Move:
    """Raises OffsetOutOfRangeError, as `Admin` would, for an offset of the user's own that cannot be."""
    if target.is_exact:
        now.check(offset)
    start, end = now.start_offset or 0, now.high_watermark or 0
    within = min(max(offset, start), end)
    return Move(now, within, stopped=within != offset)


def read_offsets(path: Path) -> dict[TopicPartition, int]:
    """Lines of topic,partition,offset; the first one may name the columns. Raises InvalidDataError."""
    offsets: dict[TopicPartition, int] = {}
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = csv.reader(file)
            for row in rows:
                cells = [cell.strip() for cell in row]
                if not any(cells) or (rows.line_num == 1 and [cell.lower() for cell in cells] == _HEADER):
                    continue
                tp, offset = _line(cells, f"{path}, line {rows.line_num}")
                if tp in offsets:
                    raise InvalidDataError(
                        f"{path}, line {rows.line_num}: {tp} a second time", hint="Name each partition once."
                    )
                offsets[tp] = offset
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InvalidDataError(f"{path} cannot be read: {error}", hint="Give a text file in UTF-8.") from None
    if not offsets:
        raise InvalidDataError(f"{path} has no offsets", hint="Write lines like `flights,0,1000`.")
    return offsets


def _line(cells: list[str], where: str) -> tuple[TopicPartition, int]:
    numbers = [digits(cell) for cell in cells[1:]]
    if len(cells) == 3 and cells[0] and numbers[0] is not None and numbers[1] is not None:
        return TopicPartition(cells[0], numbers[0]), numbers[1]
    raise InvalidDataError(
        f"{where}: {','.join(cells)[:200]!r}", hint="Write topic,partition,offset: `flights,0,1000`."
    )


def _members(admin: Admin, group: str) -> int:
    try:
        return len(admin.describe_group(group).members)
    except GroupIdNotFoundError:
        return 0


def _json(move: Move) -> dict[str, object]:
    return {
        "topic": move.now.topic,
        "partition": move.now.partition,
        "committed": move.now.committed,
        "new_offset": move.offset,
        "start_offset": move.now.start_offset,
        "end_offset": move.now.end_offset,
        "lag_after": move.lag,
    }


def _print(group: str, moves: Sequence[Move], *, executed: bool) -> None:
    columns = ("topic", "partition", "committed", "new offset", "lag after")
    rows = [
        (move.now.topic, move.now.partition, dashed(move.now.committed), move.offset, dashed(move.lag))
        for move in moves
    ]
    done = "was moved" if executed else "would be moved"
    print_table(columns, rows, title=f"group {group} {done}", right=columns[1:])
    stopped = [move.now.topic_partition for move in moves if move.stopped]
    if stopped:
        note(f"{listed(stopped)}: there are no records that far away; the first record, or the end, is taken instead")
