"""The files beside the package: pages and jobs. A checkout has them at its top, a wheel in `spark_broker_share`."""

from __future__ import annotations

from pathlib import Path

from spark_broker.errors import InvalidConfigError

SHARE = "spark_broker_share"

JOBS = ("cluster", "produce", "consume", "tier")
"""The jobs that a wheel brings."""


def share() -> Path:
    """The directory with `jobs/` and `docs/`."""
    beside = Path(__file__).resolve().parents[2]
    return beside / SHARE if (beside / SHARE).is_dir() else beside


def page_file(name: str) -> Path:
    """The file of a page. Raises InvalidConfigError, with the names of the others, for one that is not there."""
    pages = page_names()
    wanted = name.removeprefix("docs/").removesuffix(".md")
    if wanted not in pages:
        raise InvalidConfigError(f"there is no page {name!r}", hint=f"There are {', '.join(pages)}.")
    return share() / "docs" / f"{wanted}.md"


def page_names() -> list[str]:
    """The pages of the documentation, by name."""
    return sorted(path.stem for path in (share() / "docs").glob("*.md"))


def job_file(name: str) -> Path:
    """The file of a job, for spark-submit. Raises InvalidConfigError for one that is not there."""
    if name not in JOBS:
        raise InvalidConfigError(f"there is no job {name!r}", hint=f"There are {', '.join(JOBS)}.")
    return share() / "jobs" / f"{name}.py"
