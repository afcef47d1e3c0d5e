"""The notebooks run from top to bottom, and are kept without output."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
CELL_TIMEOUT_S = 180

PROMISES = {
    "quickstart": ({"image/png", "text/html"}, "3840 rows acknowledged, 3840 rows read, 3840 of them distinct"),
    "streaming": ({"image/png", "text/html"}, "rows in slow_views"),
    "from_the_kafka_source": ({"text/html"}, "1000 typed orders, the same sums"),
}
"""What each shows, and what it prints. Its own assertions compare what was sent with what is read."""


def read(path: Path) -> nbformat.NotebookNode:
    notebook: nbformat.NotebookNode = nbformat.reads(path.read_text(), as_version=4)  # type: ignore[no-untyped-call]
    return notebook


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_valid_and_kept_without_output(path: Path) -> None:
    notebook = read(path)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.outputs for cell in code] == [[]] * len(code)
    assert {cell.execution_count for cell in code} == {None}


@pytest.mark.spark
@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_shows_what_it_promises(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nbclient import NotebookClient

    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = read(path)
    client = NotebookClient(
        notebook, timeout=CELL_TIMEOUT_S, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    )
    client.execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    kinds, text = PROMISES[path.stem]
    assert kinds <= {kind for output in outputs for kind in output.get("data", {})}
    printed = "".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stdout")
    assert text in printed
    # Story: its figure showed a query that read nothing for 20 seconds.
    assert [int(read) > 1000 for read in re.findall(r"(\d+) views were read after 10 s", printed)] == (
        [True] if path.stem == "streaming" else []
    )
