#!/usr/bin/env bash
# Prints a Python interpreter from 3.11 to 3.13 that can make virtual environments, or says in one line what to install.
set -euo pipefail

suitable() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' >/dev/null 2>&1; }
makes_venvs() { "$1" -c 'import ensurepip, venv' >/dev/null 2>&1; }

is_root_on_debian() { [ "$(id -u)" -eq 0 ] && [ -f /etc/debian_version ] && command -v apt-get >/dev/null; }

find_python() {
  local name path
  for name in ${PYTHON_BOOTSTRAP:-} python3.11 python3.12 python3.13 python3 python; do
    # All of PATH is searched: a pyenv shim comes first and may stand for a version that is not selected.
    while read -r path; do
      if suitable "$path" && "$1" "$path"; then
        "$path" -c 'import sys; print(sys.executable)'
        return 0
      fi
    done < <(type -aP "$name" 2>/dev/null || true)
  done
  return 1
}

if find_python makes_venvs; then
  exit 0
fi

# Debian ships python3 without ensurepip; its package adds it.
if python=$(find_python suitable); then
  package="$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')"
  if is_root_on_debian; then
    echo "Installing $package (Debian's Python comes without venv)" >&2
    if apt-get update -q >&2 && DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "$package" >&2 \
      && find_python makes_venvs; then
      exit 0
    fi
  fi
  echo "error: $python cannot make virtual environments; install the package $package (or python3-venv)." >&2
  exit 1
fi
echo "error: Python 3.11, 3.12 or 3.13 is needed and none is on PATH; install it (Debian: python3 and python3-venv)." >&2
exit 1
