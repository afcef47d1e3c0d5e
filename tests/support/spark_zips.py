"""How tests start Spark's Python processes, which are many. `python -m tests.support.spark_zips` compiles pyspark.

Spark's Python processes import pyspark from archives that hold only sources, so each of them compiles all that it
imports: 0.45 s of a core. Python takes the bytecode where an archive has it; another version takes the sources.
"""

from __future__ import annotations

import py_compile
import tempfile
import zipfile
from pathlib import Path

from tests.support.spark_jvms import SPARK

ARCHIVES = SPARK / "python" / "lib"


def compile_in(archive: Path) -> None:
    """Put bytecode beside each source. The archive becomes another file: an installer may have linked the old one."""
    with tempfile.TemporaryDirectory(dir=archive.parent) as directory:
        source, bytecode, written = (Path(directory) / name for name in ("source.py", "bytecode", archive.name))
        with zipfile.ZipFile(archive) as given, zipfile.ZipFile(written, "w") as both:
            for member in given.infolist():
                content = given.read(member)
                both.writestr(member, content)
                if member.filename.endswith(".py") and f"{member.filename}c" not in given.NameToInfo:
                    source.write_bytes(content)
                    _compile(source, bytecode, shown=archive / member.filename)
                    both.write(bytecode, f"{member.filename}c")
        written.rename(archive)


def _compile(source: Path, bytecode: Path, shown: Path) -> None:
    # Times in archives are local: where it is another hour, a comparison with them would not hold.
    never_stale = py_compile.PycInvalidationMode.UNCHECKED_HASH
    py_compile.compile(str(source), str(bytecode), dfile=str(shown), doraise=True, invalidation_mode=never_stale)


if __name__ == "__main__":
    for archive in sorted(ARCHIVES.glob("*.zip")):
        compile_in(archive)
