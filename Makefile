.DEFAULT_GOAL := help
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
VLLM_VENV ?= .venv-vllm

.PHONY: help install vllm check test demo bench bench-forecast bench-gate bench-policy bench-controller bench-train bench-recovery test-gpu clean

help: ## this list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(STAMP): pyproject.toml constraints-dev.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints-dev.txt -e '.[train,replay,export,postgres,dev]'
	@touch $@

install: $(STAMP) ## make .venv with everything but vLLM

vllm: ## make .venv-vllm with a CPU vLLM and a tiny random model (Linux x86-64)
	PYTHON=$(PYTHON) VLLM_VENV=$(VLLM_VENV) deploy/local/install_vllm.sh

check: $(STAMP) ## format, lint, types, import contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy service sidecar controller diloco replay wadiloco.py deploy tests examples
	$(BIN)/lint-imports

test: $(STAMP) ## install what is missing and run all tests (without a CPU vLLM for this platform: all but those on it)
	PYTHON=$(PYTHON) VLLM_VENV=$(VLLM_VENV) deploy/local/install_vllm.sh || [ $$? -eq 3 ]
	failed=0; \
	$(BIN)/python -m pytest -m 'not bench and not vllm' -n 2 --dist loadfile || failed=1; \
	$(BIN)/python -m pytest -m 'vllm and not bench' || failed=1; \
	exit $$failed

test-gpu: $(STAMP) ## all tests that need a CUDA device, on a host that has one
	PYTHON=$(BIN)/python deploy/local/test_gpu.sh

demo: $(STAMP) vllm ## the main job: two vLLM servers under traffic, two islands training, three policies
	$(BIN)/wadiloco demo --out out/demo

bench: $(STAMP) vllm ## measured claims (ratios in one run)
	$(BIN)/python -m pytest -m bench -s

bench-forecast: $(STAMP) ## the forecaster against fixed smoothing factors and refitted Holt-Winters
	$(BIN)/python -m pytest -m bench -s tests/bench/test_forecast.py

bench-gate: $(STAMP) vllm ## what training costs a real server with each kind of gate (BENCH_GATE='rounds seconds loads')
	$(BIN)/python -m pytest -m bench -s tests/bench/test_gate.py

bench-policy: $(STAMP) ## what each policy's choice of moments is worth against random and best ones (TRACE=FILE for your own)
	$(if $(TRACE),BENCH_POLICY_TRACE='$(abspath $(TRACE))') $(BIN)/python -m pytest -m bench -s tests/bench/test_policy.py

bench-controller: $(STAMP) ## a large fleet on one core (BENCH_CONTROLLER='seconds sidecars islands')
	$(BIN)/python -m pytest -m bench -s tests/bench/test_controller.py

bench-train: $(STAMP) ## loss at equal tokens, and rounds beside torchft's (BENCH_TRAIN='steps H seeds warm width')
	$(BIN)/python -m pytest -m bench -s tests/bench/test_train.py

bench-recovery: $(STAMP) ## what each death costs, by phase, and what snapshots cost (BENCH_RECOVERY='kills millions of parameters')
	$(BIN)/python -m pytest -m bench -s tests/bench/test_recovery.py

clean: ## remove both environments and all output
	rm -rf $(VENV) $(VLLM_VENV) .local out build *.egg-info
