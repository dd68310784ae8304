# make demo   translate with the shipped model, in torch and in onnxruntime; make demo TEXT="A dog runs." adds a sentence
# make test   the test suite, without the slow tests; make test-all runs those too
# make test-versions  the suite, and exports without torch, at the lowest and at the newest versions of what they need
# make test-clients  libraries that others wrote, over what we save and export; needs Node and Chromium
# make cards  the models of model_cards/ with their code, as repositories that are ready for the Hub: build/cards/
# make docs   the site of docs/, with the API reference: build/docs/index.html
# make bench  the CPU benchmark, hours on an idle machine: benchmarks/results/cpu-avx2.json or cpu-vnni.json, its tables and its
#             plot; make bench CAPTIONS=FILE translates the first 1000 lines of FILE too
# make bench-peers  the same with OpenVINO and llama.cpp, which it installs; needs npm
# make bench-cuda  that of a GPU, ten minutes with the Python of PYTHON=, which has torch and onnxruntime-gpu: results/cuda.json

PYTHON ?= python3
BIN := .venv/bin
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: bench bench-cuda bench-peers cards demo docs test test-all test-clients test-versions lint

demo: .venv/installed
	$(BIN)/python benchmarks/demo.py $${TEXT:+"$$TEXT"}

test: .venv/installed
	$(BIN)/python -m pytest -q -n 2 --dist loadfile -m "not slow"

test-all: .venv/installed
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --hypothesis-profile=long

test-clients: .venv/installed
	.ci/clients

test-versions: .venv/installed
	.ci/versions

docs: .venv/installed
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e ".[docs]"
	$(BIN)/python -m sphinx -q -E -W --keep-going docs build/docs

PIPELINES := pipelines_vanilla_transformer
CODE := $(patsubst %,vanilla_transformer/%_vanilla_transformer.py,configuration layers modeling)

cards:
	rm -rf build/cards && mkdir -p build && cp -RL model_cards build/cards
	for card in build/cards/*; do cp $(CODE) $$card; done
	for config in $$(grep -l $(PIPELINES) build/cards/*/config.json); do cp vanilla_transformer/$(PIPELINES).py $${config%/*}; done

bench: .venv/installed
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e ".[bench]"
	$(BIN)/python benchmarks/speed.py $${CAPTIONS:+--captions "$$CAPTIONS"}

bench-peers: .venv/installed
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e ".[bench,peers]"
	npm install --prefix benchmarks --no-fund --no-audit
	$(BIN)/python benchmarks/speed.py $${CAPTIONS:+--captions "$$CAPTIONS"}

bench-cuda:
	$(PYTHON) benchmarks/speed.py --device cuda

# The checker of types does not follow the editable install to a folder of another name, so it gets a path that has that name.
lint: .venv/installed
	$(BIN)/ruff check . && $(BIN)/ruff format --check .
	mkdir -p build/types && ln -sfn ../../export build/types/vanilla_transformer_export
	$(BIN)/mypy
	$(BIN)/python .ci/prose.py

# torch first and by itself: the version pinned here has a CPU build, what other packages ask for may not.
.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e ".[test]"
	touch $@
