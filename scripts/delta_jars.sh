#!/usr/bin/env bash
# Puts Delta's two JARs into a directory, with Maven or, where there is none, with Spark's own resolver (slower).
# Their checksums are pinned in scripts/delta.sha256. Safe to run again: it downloads only what is missing.
set -euo pipefail
cd "$(dirname "$0")/.."

target=$1
python=.venv/bin/python
pinned=$PWD/scripts/delta.sha256
coordinates=(io.delta:delta-spark_4.2_2.13:4.4.0 io.delta:delta-storage:4.4.0)

complete() { (cd "$target" && sha256sum --check --quiet "$pinned") >/dev/null 2>&1; }

with_maven() {
  local coordinate
  for coordinate in "${coordinates[@]}"; do
    mvn -q -B org.apache.maven.plugins:maven-dependency-plugin:3.6.1:copy -Dartifact="$coordinate" -DoutputDirectory="$target"
  done
}

with_spark() {
  local ivy
  ivy=$(mktemp -d)
  "$python" - "$ivy" "$(IFS=,; echo "${coordinates[*]}")" <<'PYTHON'
import sys

from pyspark.sql import SparkSession

ivy, packages = sys.argv[1:]
builder = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
builder.config("spark.jars.ivy", ivy).config("spark.jars.packages", packages).getOrCreate().stop()
PYTHON
  local name
  while read -r _ name; do
    cp "$ivy/jars/io.delta_$name" "$target/$name"
  done <"$pinned"
  rm -rf "$ivy"
}

mkdir -p "$target"
complete && exit 0
if command -v mvn >/dev/null; then with_maven >/dev/null; else with_spark >/dev/null 2>&1; fi
complete || { echo "$target does not hold the JARs that $pinned names" >&2; exit 1; }
