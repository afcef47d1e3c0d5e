"""The notebook runs from top to bottom, and is kept without output."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "notebooks" / "quickstart.ipynb"
CELL_TIMEOUT_S = 180


def notebook() -> nbformat.NotebookNode:
    found: nbformat.NotebookNode = nbformat.reads(NOTEBOOK.read_text(), as_version=4)  # type: ignore[no-untyped-call]
    return found


def test_the_notebook_is_valid_and_kept_without_output() -> None:
    found = notebook()
    nbformat.validate(found)
    code = [cell for cell in found.cells if cell.cell_type == "code"]
    assert [cell.outputs for cell in code] == [[]] * len(code)
    assert {cell.execution_count for cell in code} == {None}


@pytest.mark.spark
@pytest.mark.timeout(300)
def test_the_notebook_runs_and_shows_what_it_promises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own assertion compares what was sent with what is read after a broker was killed."""
    from nbclient import NotebookClient

    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    found = notebook()
    client = NotebookClient(
        found, timeout=CELL_TIMEOUT_S, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    )
    client.execute()
    outputs = [output for cell in found.cells if cell.cell_type == "code" for output in cell.outputs]
    shown = {kind for output in outputs for kind in output.get("data", {})}
    assert {"image/png", "text/html"} <= shown
    printed = "".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stdout")
    assert "3840 rows acknowledged, 3840 rows read, 3840 of them distinct" in printed
