#!/usr/bin/env bash
# Makes .venv in the checkout: a virtual environment, a pinned uv, the locked dependencies, this project (editable).
# Safe to run again: it repairs what is missing and leaves the rest.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=.venv
say() { echo "[setup] $*"; }

# Spark needs Java in every target that follows; say so before the downloads, not after them.
JAVA_HOME=$(scripts/java.sh)
say "Java: $JAVA_HOME"

# A moved checkout or a removed Python leaves a dangling link: then it is made anew.
if ! "$venv/bin/python" -c 'import sys' 2>/dev/null; then
  python=$(scripts/python.sh)
  say "virtual environment from $python"
  "$python" -m venv --clear "$venv"
fi
if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
  "$venv/bin/python" -m ensurepip >/dev/null
fi

say "uv, then the locked dependencies (the first time this downloads several hundred MB)"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --require-hashes -r scripts/uv.lock.txt
# The environment is named, so that one that happens to be active elsewhere is never changed.
export VIRTUAL_ENV="$PWD/$venv"
unset PYTHONPATH PYTHONHOME PYTHONDONTWRITEBYTECODE
# Compiled once here, and not by each of the many processes that tests start.
"$venv/bin/uv" pip sync --quiet --compile-bytecode --require-hashes requirements.lock
# sync may remove what the lock does not name, uv itself included.
if [ ! -x "$venv/bin/uv" ]; then
  "$venv/bin/python" -m ensurepip >/dev/null
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --require-hashes -r scripts/uv.lock.txt
fi
"$venv/bin/uv" pip install --quiet --no-deps --editable .

say "Delta's JARs"
JAVA_HOME=$JAVA_HOME scripts/delta_jars.sh "$venv/share/spark-broker/jars"
say "done"
