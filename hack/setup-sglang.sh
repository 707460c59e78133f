#!/usr/bin/env bash
# Makes .venv-sglang: the real SGLang server, which pins a torch of its own. About 10 GB; a minute or more.
set -euo pipefail
cd "$(dirname "$0")/.."
hack/setup.sh
say() { printf '\033[1m[set-up]\033[0m %s\n' "$*" >&2; }
want=$(cat requirements-sglang.txt hack/setup-sglang.sh | cksum)
if [ "$(cat .venv-sglang/.motley-setup 2>/dev/null)" != "$want" ]; then
  say "installing SGLang into .venv-sglang (about 10 GB unpacked) ..."
  .venv/bin/uv venv --quiet --allow-existing --python .venv/bin/python .venv-sglang
  .venv/bin/uv pip sync --quiet --compile-bytecode --python .venv-sglang/bin/python --require-hashes requirements-sglang.txt
  echo "$want" > .venv-sglang/.motley-setup
  say "SGLang is ready"
fi
