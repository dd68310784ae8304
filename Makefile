# make demo           Export a translator, compare it with torch, and translate with both. TEXT="A dog runs." adds a sentence.
# make lint           Run ruff and mypy.
# make test           Run the tests, except the slow ones.
# make test-all       Run all tests.
# make test-versions  Run the tests with the lowest and with the newest versions of the dependencies.
# make test-clients   Run programs of others on our checkpoints and exports. Needs Node and Chromium.
# make test-cuda-dry  Run the cuda target on onnxruntime's CUDA provider, without a GPU. Needs g++ and 300 MB from PyPI.
# make cards          Copy the models of model_cards/, links to their code resolved, to build/cards/, ready for the Hub.
# make docs           Build the documentation with the API reference into build/docs/.
# make bench          Measure speed on a CPU. Takes hours on an idle machine, and writes benchmarks/results/cpu-*.json.
#                     CAPTIONS=FILE also translates the first 1000 lines of FILE.
# make bench-peers    The same, with OpenVINO and llama.cpp, which it installs. Needs npm.
# make bench-cuda     Measure speed on a GPU, in ten minutes, and write benchmarks/results/cuda.json.
#                     It installs torch and onnxruntime-gpu into .venv-cuda/.

PYTHON ?= python3
BIN := .venv/bin
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false
# processes that tests start read compiled modules, whatever the caller's shell says
export PYTHONDONTWRITEBYTECODE :=

.PHONY: bench bench-cuda bench-peers cards demo docs test test-all test-clients test-cuda-dry test-versions lint

demo: .venv/demo
	@echo "Importing torch and onnxruntime"
	@$(BIN)/python benchmarks/demo.py $${TEXT:+"$$TEXT"}

test: .venv/installed
	$(BIN)/python -m pytest -q -n 4 --dist loadfile -m "not slow"

test-all: .venv/installed
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --hypothesis-profile=long

test-clients: .venv/installed
	.ci/clients

test-cuda-dry: .venv/installed
	.ci/cuda_dry

test-versions: .venv/installed
	.ci/versions

docs: .venv/installed
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e ".[docs]"
	$(BIN)/python -m sphinx -q -E -W --keep-going docs build/docs

# the code of a card is a link to the package
cards:
	rm -rf build/cards && mkdir -p build && cp -RL model_cards build/cards

bench: .venv/installed
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e ".[cpu,bench]"
	$(BIN)/python benchmarks/speed.py $${CAPTIONS:+--captions "$$CAPTIONS"}

bench-peers: .venv/installed
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e ".[cpu,bench,peers]"
	npm install --prefix benchmarks --no-fund --no-audit
	$(BIN)/python benchmarks/speed.py $${CAPTIONS:+--captions "$$CAPTIONS"}

bench-cuda: .venv-cuda/installed
	.venv-cuda/bin/python benchmarks/speed.py --device cuda

# The checker of types does not follow the editable install to a folder of another name, so it gets a path that has that name.
lint: .venv/installed
	$(BIN)/ruff check . && $(BIN)/ruff format --check .
	mkdir -p build/types && ln -sfn ../../export build/types/vanilla_transformer_export
	$(BIN)/mypy
	$(BIN)/python .ci/prose.py

# torch first and by itself: the version pinned here has a CPU build, what other packages ask for may not.
.venv/demo: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	.ci/install "torch" torch
	.ci/install "transformers and onnxruntime" -e ".[torch,cpu]"
	touch $@

.venv/installed: .venv/demo
	.ci/install "what the tests need" -e ".[cpu,test]"
	touch $@

# An environment of its own, because onnxruntime-gpu and onnxruntime write the same files.
.venv-cuda/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-cuda
	.venv-cuda/bin/pip install -q --disable-pip-version-check -c constraints.txt -e ".[gpu,bench]"
	touch $@
