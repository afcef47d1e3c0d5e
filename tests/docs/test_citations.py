"""Everything that a page or a comment cites is in the repository: paths, names in them, links, headings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.test_tidy import ROOT, tracked_files

SUFFIXES = r"(?:py|md|toml|sh|ipynb|yaml)"

# `broker/partition.py`, or `broker/partition.py: append` with a name that the file defines.
CITED_FILE = re.compile(rf"`((?:[\w.-]+/)*[\w.-]+\.{SUFFIXES})(?:: *(\w+))?`")
CITED_FOLDER = re.compile(r"`((?:[\w-]+/)+)`")
CITED_MODULE = re.compile(r"`((?:spark_broker|pyspark_spark_broker|tests|jobs|benchmarks)(?:\.\w+)+)`")
CITED_MEMBER = re.compile(r"`([A-Z]+[a-z]\w*)\.(\w+)(?:\(.*?\))?`")
PAGE = re.compile(r"(?<![\w*{}<>/.-])((?:[\w-]+/)*[\w-]+\.md)\b")
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)

# Written in two pieces, so that this file does not break the rule that it keeps.
OUTSIDE = re.compile(r"\b(?:KNOWN_" + r"BUGS|SPARK_" + r"FACTS|DE" + r"SIGN \d|STY" + r"LE\.md)")


def texts() -> list[Path]:
    return [path for path in tracked_files() if path.suffix in (".py", ".md", ".toml", ".sh", ".yaml", "")]


@cache
def paths() -> frozenset[str]:
    """Every file of the repository, and every folder with a slash at its end, in all ways in which it may be cited."""
    names = {path.relative_to(ROOT) for path in tracked_files()}
    folders = {parent for name in names for parent in name.parents}
    return frozenset(tail for name in names for tail in tails(name)) | frozenset(
        f"{tail}/" for folder in folders for tail in tails(folder)
    )


def tails(name: Path) -> Iterator[str]:
    """`a/b/c.py`, `b/c.py`, `c.py`: a page names a file from the folder that it is about."""
    return ("/".join(name.parts[start:]) for start in range(len(name.parts)))


def missing(text: str) -> Iterator[str]:
    """What a text cites and what is not there."""
    for match in CITED_FILE.finditer(text):
        if match[1] not in paths():
            yield match[1]
        elif match[2] and not any(defines(path, match[2]) for path in files_named(match[1])):
            yield f"{match[1]}: {match[2]}"
    yield from (match[1] for match in CITED_FOLDER.finditer(text) if match[1] not in paths())
    yield from (match[1] for match in CITED_MODULE.finditer(text) if not module_exists(match[1]))
    yield from (match[0] for match in CITED_MEMBER.finditer(text) if not is_member(match[1], match[2]))
    yield from (match[1] for match in PAGE.finditer(text) if match[1] not in paths())


@cache
def files_named(name: str) -> list[Path]:
    return [path for path in tracked_files() if str(path.relative_to(ROOT)).endswith(name)]


def defines(path: Path, name: str) -> bool:
    return re.search(rf"\b(?:def|class) {name}\b|^\s*{name}\b.*=", path.read_text(), re.MULTILINE) is not None


def module_exists(dotted: str) -> bool:
    """A module or package, or a name that one of them defines."""
    parts = dotted.split(".")
    for size in range(len(parts), 0, -1):
        place = ROOT.joinpath(*parts[:size])
        file = place.with_suffix(".py") if place.with_suffix(".py").is_file() else place / "__init__.py"
        if file.is_file():
            return size == len(parts) or re.search(rf"\b{parts[size]}\b", file.read_text()) is not None
    return False


@cache
def classes() -> dict[str, str]:
    """The sources of the files that define each class of the repository."""
    sources: dict[str, str] = {}
    for path in tracked_files():
        text = path.read_text() if path.suffix == ".py" else ""
        for name in re.findall(r"^class (\w+)", text, re.MULTILINE):
            sources[name] = sources.get(name, "") + text
    return sources


def is_member(owner: str, name: str) -> bool:
    """Whether a file that defines the class mentions the name. A class from outside of the repository is not judged."""
    source = classes().get(owner)
    return source is None or re.search(rf"\b{name}\b", source) is not None


def slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


def broken_links(page: Path) -> Iterator[str]:
    for match in LINK.finditer(page.read_text()):
        target, _, anchor = match[1].partition("#")
        file = (page.parent / target).resolve() if target else page
        if not target.startswith(("http:", "https:")) and not (file.exists() and has_heading(file, anchor)):
            yield match[1]


def has_heading(page: Path, anchor: str) -> bool:
    return not anchor or anchor in {slug(heading) for heading in HEADING.findall(page.read_text())}


@pytest.mark.slow
def test_every_file_module_and_name_that_is_cited_is_there() -> None:
    missing_by_file = {str(path.relative_to(ROOT)): sorted(set(missing(path.read_text()))) for path in texts()}
    missing_by_file.pop("tests/docs/test_citations.py")  # its own bad examples
    assert {name: cited for name, cited in missing_by_file.items() if cited} == {}


def test_every_link_of_a_page_leads_somewhere() -> None:
    broken_by_page = {str(page.relative_to(ROOT)): list(broken_links(page)) for page in texts() if page.suffix == ".md"}
    assert {name: links for name, links in broken_by_page.items() if links} == {}


def test_nothing_cites_a_page_outside_of_the_repository() -> None:
    assert [str(path.relative_to(ROOT)) for path in texts() if OUTSIDE.search(path.read_text())] == []


@pytest.mark.parametrize(
    "text",
    [
        "see `broker/nowhere.py`",
        "see `core/replica.py: no_such_name`",
        "in `broker/nowhere/`",
        "`spark_broker.no_such_module`",
        "`spark_broker.errors.NoSuchError`",
        "`Replica.no_such_method`, or `Consumer.nothing()`",
        "as NOWHERE.md says",
        "docs/nowhere.md",
    ],
)
def test_what_is_not_there_is_found(text: str) -> None:
    assert list(missing(text))


@pytest.mark.parametrize(
    "text",
    [
        "`spark_broker/errors.py`, `errors.py`, `core/replica.py: prepare_append`, `docs/`, `core/`",
        "`spark_broker.errors.SparkBrokerError`, `spark_broker.testing`, docs/known-bugs.md",
        "`Producer.append`, `Admin.describe_topic(name).schema`, `Condition.wait`",
        "`log-state.json`, `<file>.brokers`, `a.b = 1`, {name}.md",
    ],
)
def test_what_is_there_is_not_accused(text: str) -> None:
    assert list(missing(text)) == []


def test_a_link_to_no_heading_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A `fine` day\n[a](#a-fine-day) [b](#b) [c](other.md) [d](page.md#a-fine-day)\n")
    assert list(broken_links(page)) == ["#b", "other.md"]
