#!/usr/bin/env bash
# Prints the JAVA_HOME of a Java 17 or newer: $JAVA_HOME, then PATH, then /usr/lib/jvm, then (root on Debian) a new one.
# Where there is none and none can be installed, one line says what to install.
set -euo pipefail

minimum=17

# The major version of a Java home; nothing when it holds no working java.
major_of() {
  local version
  version=$("$1/bin/java" -version 2>&1 | sed -n 's/.*version "\([0-9]*\)\.*\([0-9]*\).*/\1 \2/p' | head -n 1) || return 0
  # Java 8 calls itself 1.8.
  case "$version" in "1 "*) echo "${version#1 }" ;; *) echo "${version%% *}" ;; esac
}

new_enough() {
  local major
  [ -x "$1/bin/java" ] || return 1
  major=$(major_of "$1")
  [ -n "$major" ] && [ "$major" -ge "$minimum" ]
}

# The home of the java on PATH: its links lead to <home>/bin/java.
home_on_path() {
  local java
  java=$(command -v java) || return 0
  java=$(readlink -f "$java" 2>/dev/null) || return 0
  dirname "$(dirname "$java")"
}

candidates() {
  echo "${JAVA_HOME:-}"
  home_on_path
  # macOS answers by itself; elsewhere the command does not exist.
  /usr/libexec/java_home -v "$minimum+" 2>/dev/null || true
  local home
  for home in /usr/lib/jvm/*; do [ -d "$home" ] && echo "$home"; done
}

find_java() {
  local home
  while read -r home; do
    if [ -n "$home" ] && new_enough "$home"; then
      echo "$home"
      return 0
    fi
  done < <(candidates)
  return 1
}

install_java() {
  local package
  echo "Installing Java (no Java $minimum or newer was found)" >&2
  apt-get update -q >&2 || return 1
  # Debian's default may be older than what Spark needs, and a given version may be absent from a release: try in turn.
  for package in openjdk-17-jre-headless openjdk-21-jre-headless default-jre-headless; do
    DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "$package" >&2 && return 0
  done
  return 1
}

if find_java; then
  exit 0
fi
if [ "$(id -u)" -eq 0 ] && [ -f /etc/debian_version ] && command -v apt-get >/dev/null; then
  if install_java && find_java; then
    exit 0
  fi
fi
echo "error: Java $minimum or newer is needed and was not found; install it (Debian: openjdk-17-jre-headless) or set JAVA_HOME." >&2
exit 1
