"""The stores of the metadata log's files. A store creates a name at most once, even if several writers try at a time.

Each kind of store has an adapter, which makes create exclusive. fsspec's own `mode="create"` on local files checks and
then writes: two writers can both succeed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
import uuid
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

import fsspec

from spark_broker.driver.store_reserve import RESERVE_PREFIX, TEMPORARY_PREFIX, Reserve, new_path, private, remove
from spark_broker.errors import DamagedLogError, MetadataStoreError
from spark_broker.storage.files import is_full, read_whole
from spark_broker.storage.filesystem import LOCAL

PROBE_PREFIX = ".probe-"
LEFT_OVER_AGE_S = 3600.0

CONDITIONAL_PUT_PROTOCOLS = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az"})
"""Object stores whose fsspec adapter turns `mode="create"` into one conditional PUT. Others check, and then write."""


class MetadataStore(Protocol):
    """A flat directory of immutable files. Every method may raise OSError: the result is then unknown."""

    def create(self, name: str, data: bytes) -> bool:
        """Create the file with these bytes, durably, unless the name exists. False: it exists."""

    def read(self, name: str) -> bytes | None:
        """The file's bytes; None when it does not exist. Raises MetadataStoreError for one that cannot be ours."""

    def names(self) -> list[str]:
        """The names of all files, sorted."""

    def delete(self, name: str) -> None:
        """Delete the file; one that does not exist is no error."""

    def __str__(self) -> str:
        """The store's address, for messages."""


class ClaimStore(MetadataStore, Protocol):
    """A store that holds the claim beside the log: the one file that is written again."""

    def put(self, name: str, data: bytes) -> None:
        """Write the file, whether or not it exists. Readers see the old bytes or the new ones. Nothing is synced."""


def open_store(url: str) -> ClaimStore:
    """The store at a path or fsspec URL, after proof that it creates exclusively. Raises MetadataStoreError."""
    protocol = fsspec.utils.get_protocol(url)
    try:
        store: ClaimStore
        if protocol in ("file", "local"):
            store = LocalStore(_local_path(url))
        elif protocol in CONDITIONAL_PUT_PROTOCOLS:
            with _as_os_error():
                filesystem, root = fsspec.core.url_to_fs(url)
            store = ObjectStore(filesystem, root)
        else:
            raise MetadataStoreError(f"metadata.dir {url}: {protocol} is not known to create files exclusively")
        check_exclusive(store)
    except (OSError, ValueError, ImportError) as error:
        raise MetadataStoreError(f"metadata.dir {url}: {error}") from error
    return store


def _local_path(url: str) -> str:
    return os.path.abspath(unquote(urlsplit(url).path) if "://" in url else url.removeprefix("file:"))


def check_exclusive(store: MetadataStore) -> None:
    """Create a probe twice: a store that accepts both would let two controllers win. Raises MetadataStoreError."""
    name = f"{PROBE_PREFIX}{uuid.uuid4().hex}"
    try:
        first, second = store.create(name, b"1"), store.create(name, b"2")
        kept = store.read(name)
    finally:
        store.delete(name)
    if not first or second or kept != b"1":
        raise MetadataStoreError(f"{store} accepts a second create of the same name")


class LocalStore:
    """A local (or properly shared POSIX) directory: a temporary file, fsync, `link`, fsync of the directory.

    A failed fsync is never repeated on the same file, whose pages the kernel may have dropped: the next try writes
    another file. What a full disk refuses is written over a piece of the reserve. While the path leads to another
    directory (this one was moved, or something was mounted over it), every method raises OSError.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        os.makedirs(path, mode=0o700, exist_ok=True)
        self._directory = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._directory)
        self._reserve = Reserve(path)
        self._remove_left_overs()

    def __str__(self) -> str:
        return self._path

    def _remove_left_overs(self) -> None:
        """Remove the files of writers that crashed long ago. A younger file may belong to a writer that is at work."""
        for entry in os.scandir(self._path):
            if entry.name.startswith((TEMPORARY_PREFIX, PROBE_PREFIX)):
                with contextlib.suppress(FileNotFoundError):
                    if time.time() - entry.stat().st_mtime > LEFT_OVER_AGE_S:
                        os.unlink(entry.path)

    def _check(self) -> None:
        if not os.path.samestat(os.fstat(self._directory), os.stat(self._path)):
            raise OSError(errno.ESTALE, "this is another directory than the one that is in use", self._path)

    def create(self, name: str, data: bytes) -> bool:
        self._check()
        temporary = new_path(self._path, TEMPORARY_PREFIX)
        try:
            from_reserve = not self._write(temporary, data, sync=True)
            created = self._link(temporary, name)
            self._sync_directory()
        finally:
            with contextlib.suppress(OSError):  # if the store fails, a later controller removes the file
                os.unlink(temporary)
        if not from_reserve:
            self._reserve.fill()
        return created

    def _link(self, temporary: str, name: str) -> bool:
        """False: the name exists, perhaps by an earlier try of ours whose name was not synced."""
        while True:
            try:
                os.link(temporary, os.path.join(self._path, name))
            except FileExistsError:
                return False
            except OSError as error:
                if not is_full(error) or not self._reserve.delete_one():
                    raise
            else:
                return True

    def put(self, name: str, data: bytes) -> None:
        self._check()
        path, temporary = os.path.join(self._path, name), new_path(self._path, TEMPORARY_PREFIX)
        try:
            if not self._write(temporary, data, sync=False):
                self._reserve.keep(path)  # Else a file that is put again and again would use the reserve up.
            os.replace(temporary, path)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise

    def _write(self, path: str, data: bytes, *, sync: bool) -> bool:
        """Write a new file; False: on a full disk, out of the reserve. Raises OSError, also where that has no room."""
        try:
            with open(path, "xb", opener=private) as file:
                file.write(data)
                file.flush()
                if sync:
                    os.fsync(file.fileno())
        except OSError as error:
            if not is_full(error):
                raise
            remove(path)
            if not self._reserve.write(path, data):
                raise
            return False
        return True

    def _sync_directory(self) -> None:
        descriptor = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def read(self, name: str) -> bytes | None:
        self._check()
        try:
            return read_whole(LOCAL, Path(self._path, name))
        except FileNotFoundError:
            self._check()  # raises where the directory is gone: the file may exist all the same
            return None
        except DamagedLogError as error:
            raise MetadataStoreError(f"{self._path} is damaged: {error.message}") from None

    def names(self) -> list[str]:
        self._check()
        return sorted(name for name in os.listdir(self._path) if not name.startswith(RESERVE_PREFIX))

    def delete(self, name: str) -> None:
        self._check()
        remove(os.path.join(self._path, name))


@contextlib.contextmanager
def _as_os_error() -> Iterator[None]:
    """Adapters of fsspec raise what their clients raise: errors of botocore, Azure, aiohttp. Here each is an OSError.

    The result is not known then, and the call may be made again.
    """
    try:
        yield
    except (OSError, MemoryError):
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


class ObjectStore:
    """An object store through fsspec; `create` is one conditional PUT. Raises OSError."""

    def __init__(self, filesystem: Any, root: str) -> None:
        self._filesystem = filesystem
        self._root = root.rstrip("/")

    def __str__(self) -> str:
        return str(self._filesystem.unstrip_protocol(self._root))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def create(self, name: str, data: bytes) -> bool:
        try:
            with _as_os_error():
                self._filesystem.pipe_file(self._path(name), data, mode="create")
        except FileExistsError:
            return False
        return True

    def put(self, name: str, data: bytes) -> None:
        with _as_os_error():
            self._filesystem.pipe_file(self._path(name), data)

    def read(self, name: str) -> bytes | None:
        try:
            with _as_os_error():
                return bytes(self._filesystem.cat_file(self._path(name)))
        except FileNotFoundError:
            return None

    def names(self) -> list[str]:
        return sorted(self._names())

    def _names(self) -> Iterator[str]:
        try:
            with _as_os_error():
                self._filesystem.invalidate_cache()  # listings are cached per process; another writer's file must show
                paths = list(self._filesystem.ls(self._root, detail=False))
        except FileNotFoundError:
            return
        for path in paths:
            yield str(path).rsplit("/", 1)[-1]

    def delete(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError), _as_os_error():
            self._filesystem.rm_file(self._path(name))
