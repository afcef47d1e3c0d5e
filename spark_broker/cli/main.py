"""Entry point of `spark-broker`. It checks for packages before it imports them, to report a missing one in one line."""

from __future__ import annotations

import errno
import importlib.util
import sys
from collections.abc import Sequence

from spark_broker.cli.output import print_error
from spark_broker.cli.streams import take_streams
from spark_broker.errors import MissingDependencyError, SparkBrokerError
from spark_broker.process_limits import SYSTEM_LIMITS, limit_reached

NEEDED = ("typer", "rich")

INTERRUPTED = 130
"""The status of a command that Ctrl-C has ended."""

LIMITS = SYSTEM_LIMITS | {errno.ENOSPC, errno.EDQUOT}
"""Of this process, of its user (no further process can be started), or of a disk. The error may name no file."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line with these arguments (by default the process's), and exit with its status."""
    output = take_streams()
    try:
        _check_dependencies()
        from spark_broker.cli.app import app

        try:
            app(args=None if arguments is None else list(arguments), prog_name="spark-broker")
        finally:
            sys.stdout.flush()  # Python's own flush at exit would tell of it in a traceback.
    except SparkBrokerError as error:
        print_error(str(error))
        sys.exit(1)
    except KeyboardInterrupt:  # while modules are imported; typer answers it later
        sys.exit(INTERRUPTED)
    except (MemoryError, RuntimeError) as error:
        limit = limit_reached(error)
        if limit is None:
            raise
        print_error(str(limit))
        sys.exit(1)
    except OSError as error:
        if output is None or output.failed is None:
            if error.filename is None and error.errno not in LIMITS:
                raise
            print_error(": ".join(str(part) for part in (error.filename, error.strerror) if part))
            sys.exit(1)
        output.drop()
        if not isinstance(error, BrokenPipeError):  # Else the reader of our output has left (`| head`).
            print_error(f"the output cannot be written: {output.failed.strerror}")
        sys.exit(1)


def _check_dependencies() -> None:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingDependencyError(f"the command line needs {' and '.join(missing)}: pip install 'spark-broker[cli]'")


if __name__ == "__main__":
    main()
