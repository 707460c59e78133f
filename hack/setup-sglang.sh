#!/usr/bin/env bash
# Makes .venv-sglang: the real SGLang server for a CPU, which pins a torch of its own. About 7 GB; a minute or more.
# requirements-sglang.txt leaves out what only runs on a GPU (sgl_kernel, flashinfer, CUTLASS, ...: 3 GB) and outlines, which has
# to be compiled for Python 3.13: nothing of it is imported there. On GPUs SGLang's own image is used (images/sampler.Dockerfile).
set -euo pipefail
cd "$(dirname "$0")/.."
hack/setup.sh
say() { printf '\033[1m[set-up]\033[0m %s\n' "$*" >&2; }
want=$(cat requirements-sglang.txt hack/setup-sglang.sh | cksum)
if [ "$(cat .venv-sglang/.motley-setup 2>/dev/null)" != "$want" ]; then
  say "installing SGLang into .venv-sglang (about 7 GB unpacked, 3 GB to download) ..."
  .venv/bin/uv venv --quiet --allow-existing --python .venv/bin/python .venv-sglang
  .venv/bin/uv pip sync --quiet --no-build --compile-bytecode --python .venv-sglang/bin/python --require-hashes requirements-sglang.txt
  echo "$want" > .venv-sglang/.motley-setup
  say "SGLang is ready"
fi
