"""Where executors on `local-cluster[...]` work, and when their folders go.

Spark has no setting for this place: it is `work` in SPARK_HOME, and that of a pip-installed PySpark is inside of
site-packages. So such an application gets a SPARK_HOME in the user's state directory, which has links to all of the
real one and a `work` of its own. Each executor's folder there has its logs and a copy of each JAR.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import shutil
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from spark_broker.errors import InvalidConfigError

logger = logging.getLogger(__name__)

WORK = "work"

STARTS_S = 120.0
"""A worker makes an application's folder, and then starts its executors in it, which takes seconds."""

KEPT_S = 7 * 24 * 3600.0
"""The logs of an application that has ended are kept this long."""


def state_directory() -> Path:
    """`spark-broker` in the user's state directory (XDG_STATE_HOME). Raises InvalidConfigError."""
    return users_directory("XDG_STATE_HOME", ".local/state")


def users_directory(variable: str, otherwise: str) -> Path:
    """`spark-broker` in the directory that the variable names, or in this one of the user's home.

    Raises InvalidConfigError where the home directory is not known.
    """
    try:
        base = os.environ.get(variable) or Path.home() / otherwise
    except RuntimeError:
        raise InvalidConfigError(
            "the user has no home directory", hint=f"Set HOME, or {variable}, to a directory that can be written."
        ) from None
    return Path(base) / "spark-broker"


def use_own_folder() -> None:
    """Let the JVM that this process is about to start put executors' folders into the state directory.

    A SPARK_HOME that the user has set stays. Folders that nobody needs any more are removed. Where the state directory
    cannot be written, the folders stay in Spark's own: where logs are put is no reason not to start.
    """
    try:
        _use(state_directory() / "spark-homes")
    except (OSError, InvalidConfigError) as error:
        logger.warning("executors' folders stay in Spark's own directory: %s", error)


def _use(homes: Path) -> None:
    given = os.environ.get("SPARK_HOME")
    if given is not None and not Path(given).is_relative_to(homes):
        return
    installed = find_spec("pyspark")
    if installed is None or installed.origin is None or not (Path(installed.origin).parent / "jars").is_dir():
        return  # PySpark was not installed with Spark inside: it finds Spark by itself, or says that there is none.
    spark = Path(installed.origin).parent
    # One for each PySpark: processes that live on, and their children, keep the links that they began with.
    home = homes / hashlib.sha256(str(spark).encode()).hexdigest()[:12]
    _link(spark, home)
    clean(home / WORK, time.time())
    os.environ["SPARK_HOME"] = str(home)


def _link(spark: Path, home: Path) -> None:
    """Make `home` a directory with a link to each entry of Spark's own, other than the place of work."""
    work = home / WORK
    work.mkdir(parents=True, exist_ok=True)
    if not os.access(work, os.W_OK | os.X_OK):  # Another user may have made it.
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(work))
    wanted = {entry.name: entry for entry in spark.iterdir() if entry.name not in (WORK, "__pycache__")}
    for entry in home.iterdir():
        if entry.is_symlink() and entry.name not in wanted:
            entry.unlink(missing_ok=True)
    for name, target in wanted.items():
        link = home / name
        if not link.is_symlink() or link.readlink() != target:
            # Under another name first: other applications are started meanwhile.
            fresh = home / f".{name}.{os.getpid()}"
            fresh.symlink_to(target)
            fresh.replace(link)


def clean(work: Path, now: float) -> None:
    """Remove JARs of applications that have ended, and all that is left of them a week later. `now`: seconds since
    1970.
    """
    in_use = set(_working_directories())
    for application in work.iterdir():
        if any(place.is_relative_to(application) for place in in_use):
            continue
        try:
            _clean_ended(application, now)
        except FileNotFoundError:
            continue  # Another start cleans, too.
        except OSError as error:  # Another user's, for one: that is no reason not to start.
            logger.warning("%s stays: %s", application, error)


def _clean_ended(application: Path, now: float) -> None:
    files = [path for path in application.rglob("*") if path.is_file()]
    newest = max(path.stat().st_mtime for path in (application, *files))
    if now - newest > KEPT_S:
        shutil.rmtree(application)
    elif now - application.stat().st_mtime > STARTS_S:
        for jar in files:
            if jar.suffix == ".jar":
                jar.unlink()


def _working_directories() -> Iterator[Path]:
    """Those of this machine's processes, as far as this user may see them."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            yield (process / "cwd").readlink()
        except OSError:
            continue  # it has ended, or is another user's
