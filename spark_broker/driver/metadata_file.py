"""The format of the metadata log's files: a header with the file's number, epoch, writer and CRC, then records."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from spark_broker.controller.records import MetadataRecord, decode_records, encode_records
from spark_broker.errors import InvalidRequestError, MetadataStoreError
from spark_broker.protocol.crc32c import crc32c_of

LOG_SUFFIX = ".log"
SNAPSHOT_SUFFIX = ".snapshot"

_MAGIC = b"SPBM"
_VERSION = 1
# magic, version, is it a snapshot, number, controller epoch, offset, writer, length of the records; then the CRC.
_HEADER = struct.Struct("<4sHHqqq32sQ")
_CRC = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class MetadataFile:
    """One file. `offset` is that of a log file's first record, or of the next record after a snapshot. A snapshot's
    `number` is that of the last log file that it covers. `writer`: UUID of the controller, 32 hex digits."""

    number: int
    controller_epoch: int
    offset: int
    writer: str
    records: tuple[MetadataRecord, ...]
    snapshot: bool = False

    @property
    def name(self) -> str:
        return file_name(self.number, snapshot=self.snapshot)


def file_name(number: int, *, snapshot: bool = False) -> str:
    return f"{number:020d}{SNAPSHOT_SUFFIX if snapshot else LOG_SUFFIX}"


def file_number(name: str, *, snapshot: bool = False) -> int | None:
    """The number in a file's name; None for any other file."""
    stem = name.removesuffix(SNAPSHOT_SUFFIX if snapshot else LOG_SUFFIX)
    return int(stem) if stem != name and len(stem) == 20 and stem.isascii() and stem.isdigit() else None


def encode_file(file: MetadataFile) -> bytes:
    """The file's bytes."""
    payload = encode_records(file.records)
    header = _HEADER.pack(
        _MAGIC,
        _VERSION,
        file.snapshot,
        file.number,
        file.controller_epoch,
        file.offset,
        file.writer.encode("ascii"),
        len(payload),
    )
    return b"".join((header, _CRC.pack(crc32c_of((header, payload))), payload))


def decode_file(name: str, data: bytes) -> MetadataFile:
    """The file that has this name. Raises MetadataStoreError when it is torn, damaged or another file."""
    start = _HEADER.size + _CRC.size
    if len(data) < start:
        raise MetadataStoreError(f"{name} is damaged: it has only {len(data)} bytes")
    magic, version, snapshot, number, epoch, offset, writer, length = _HEADER.unpack_from(data)
    header, payload = data[: _HEADER.size], data[start:]
    (crc,) = _CRC.unpack_from(data, _HEADER.size)
    if magic != _MAGIC or len(payload) != length or crc32c_of((header, payload)) != crc:
        raise MetadataStoreError(f"{name} is damaged: its checksum does not match")
    if version != _VERSION:
        raise MetadataStoreError(f"{name} has format {version}; this version of spark-broker reads {_VERSION}")
    try:
        records = tuple(decode_records(payload))
    except InvalidRequestError as error:
        raise MetadataStoreError(f"{name} is damaged: {error.message}") from error
    file = MetadataFile(number, epoch, offset, writer.decode("ascii", errors="replace"), records, bool(snapshot))
    if file.name != name:
        raise MetadataStoreError(f"{name} holds what belongs into {file.name}")
    return file
