# make demo   the main job: one mixed-precision run on a real control plane, on this machine
# make test   the tests, with all of their set-up
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
export PYTHONUNBUFFERED = 1
PY := .venv/bin/python
KEEP ?= 0
SGLANG ?= 0
SEED ?= 0

.PHONY: help
help: ## this list
	@awk -F':.*## ' '/^[a-z%-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: setup
setup: ## the Python environment in .venv (PYTHON=/path/to/python3.12 to choose the interpreter)
	@hack/setup.sh

.PHONY: venv-sglang
venv-sglang: setup ## the real SGLang server, in .venv-sglang
	@hack/setup-sglang.sh

.PHONY: demo
demo: setup $(if $(filter 1,$(SGLANG)),venv-sglang) ## a whole run on the local cluster (KEEP=1 leaves it up; SGLANG=1 serves one group with SGLang; SEED=n)
	@exec $(PY) examples/demo/demo.py $(if $(filter 1,$(KEEP)),--keep) $(if $(filter 1,$(SGLANG)),--sglang) --seed $(SEED)

.PHONY: test
test: setup ## every test that this machine can run
	@$(PY) -m motley_local.main build
	@$(PY) -m pytest -q $(ARGS)

.PHONY: test-e2e
test-e2e: setup ## one short run end to end on the local cluster
	@$(PY) -m motley_local.main build
	@$(PY) -m pytest -q -m e2e --e2e $(ARGS)

.PHONY: test-sglang
test-sglang: venv-sglang ## the tests that need the real SGLang server, a run on the local cluster among them
	@$(PY) -m motley_local.main build
	@$(PY) -m pytest -q -m sglang --e2e tests/engine tests/agent tests/e2e $(ARGS)

.PHONY: study
study: setup ## the mixed-precision ablation in miniature (ARM=..., SEEDS=...)
	@$(PY) -m benchmarks.study $(if $(ARM),--arm $(ARM)) $(if $(SEEDS),--seeds $(SEEDS)) $(ARGS)

.PHONY: verify
verify: setup ## linters, types, layers, generated files
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@.venv/bin/mypy
	@.venv/bin/lint-imports
	@.venv/bin/motley crds --check --reference docs/reference.md crds charts/motley/files/crds

.PHONY: crds
crds: setup ## write the CRDs again after a change to api/motley_api/resources
	@.venv/bin/motley crds --reference docs/reference.md crds charts/motley/files/crds

.PHONY: tiny-model
tiny-model: setup ## make the demo's model and tasks again
	@$(PY) examples/demo/make_model.py

.PHONY: lock
lock: ## pin the dependencies again
	@.venv/bin/uv pip compile -q pyproject.toml --extra demo --extra test --extra s3 --universal --python-version 3.12 \
	  --generate-hashes --no-annotate --no-header --no-emit-index-url --upgrade -o requirements.txt

SGLANG_LEFT_OUT := sglang-kernel flashinfer-python flash-attn-4 humming-kernels nvidia-cutlass-dsl nvidia-cutlass-dsl-libs-base \
  nvidia-cutlass-dsl-libs-core nvidia-cutlass-dsl-libs-cu12 nvidia-cutlass-dsl-libs-cu13 nvidia-mathdx nvshmem4py-cu13 quack-kernels \
  sgl-deep-ep sgl-deep-gemm sgl-flash-mla tilelang cuda-tile cuda-core nvidia-cuda-nvcc nvidia-nvvm nvidia-cuda-crt \
  nvidia-cudnn-frontend nvidia-cuda-cccl outlines outlines-core z3-solver
.PHONY: lock-sglang
lock-sglang: setup ## pin SGLang again, without what only runs on a GPU
	@echo 'sglang==0.5.23' | .venv/bin/uv pip compile -q - --python-platform x86_64-manylinux_2_34 --python-version 3.12 \
	  --generate-hashes --no-annotate --no-header --no-emit-index-url $(SGLANG_LEFT_OUT:%=--no-emit-package %) -o requirements-sglang.txt

# A rule of its own: the benchmark cannot be named after the standard library's module `operator`.
.PHONY: bench-operator
bench-operator: setup ## the operator at scale on a real control plane (RUNS=20 GROUPS=8 PODS=1000)
	@$(PY) -m motley_local.main build
	@$(PY) -m benchmarks.scale $(if $(RUNS),--runs $(RUNS)) $(if $(GROUPS),--groups $(GROUPS)) $(if $(PODS),--pods $(PODS)) $(ARGS)

.PHONY: bench-%
bench-%: setup ## bench-router, bench-loss, bench-records, ...: a benchmark; its last line is JSON (ARGS=...)
	@$(PY) benchmarks/$*.py $(ARGS)

.PHONY: clean
clean: ## remove what the demo and the local cluster wrote
	@rm -rf build
