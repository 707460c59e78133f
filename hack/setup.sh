#!/usr/bin/env bash
# Bytecode is compiled here, once: pods must not write it, and thirteen of them would compile torch at every start.
# Makes .venv with everything that the demo and the tests need, and says what it is doing. Quick when nothing changed.
# PYTHON=/path/to/python overrides the interpreter (3.12 or 3.13).
set -euo pipefail
cd "$(dirname "$0")/.."
say() { printf '\033[1m[set-up]\033[0m %s\n' "$*" >&2; }

suitable() { "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 12) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1; }

find_python() {
  if [ -n "${PYTHON:-}" ]; then
    suitable "$PYTHON" || { say "PYTHON=$PYTHON must be Python 3.12 or 3.13 with venv; it is $("$PYTHON" --version 2>&1 || echo 'not there')"; return 1; }
    echo "$PYTHON"; return
  fi
  local candidate
  for candidate in python3.13 python3.12 python3 python \
      "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.13*/bin/python "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python \
      /opt/homebrew/bin/python3.13 /opt/homebrew/bin/python3.12 /usr/local/bin/python3.13 /usr/local/bin/python3.12; do
    if command -v "$candidate" >/dev/null 2>&1 && suitable "$candidate"; then command -v "$candidate"; return; fi
  done
  if command -v uv >/dev/null 2>&1; then
    say "no Python 3.12 or 3.13 found; asking uv for one"
    uv python install 3.12 >&2 && uv python find 3.12 && return
  fi
  say "no Python 3.12 or 3.13 was found (on PATH, under pyenv). Install one, or name it: make PYTHON=/path/to/python3.12 ..."
  return 1
}

want=$(cat requirements.txt pyproject.toml hack/setup.sh | cksum)
if [ "$(cat .venv/.motley-setup 2>/dev/null)" != "$want" ] || ! .venv/bin/python -c pass >/dev/null 2>&1; then
  if ! .venv/bin/python -c 'import sys; sys.exit(not (3, 12) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1; then
    python=$(find_python)
    say "making .venv with $("$python" --version) ($python)"
    rm -rf .venv
    "$python" -m venv .venv
  fi
  if ! .venv/bin/uv --version >/dev/null 2>&1; then
    say "installing uv, which installs the rest"
    .venv/bin/python -m pip --version >/dev/null 2>&1 || .venv/bin/python -m ensurepip >/dev/null
    .venv/bin/python -m pip install --quiet --disable-pip-version-check uv
  fi
  say "installing pinned dependencies and compiling them (torch's Linux wheels are about 5 GB unpacked: one to several minutes) ..."
  .venv/bin/uv pip sync --quiet --compile-bytecode --python .venv/bin/python --require-hashes requirements.txt
  .venv/bin/uv pip install --quiet --python .venv/bin/python --no-deps --editable .
  echo "$want" > .venv/.motley-setup
  say "the environment is ready"
fi
