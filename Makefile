# Every target sets itself up: a machine with Python 3.11, 3.12 or 3.13 and make needs nothing else.
# Most tests ran on 3.11, so it comes first.
PYTHON ?= $(or $(shell for version in 3.11 3.12 3.13; do \
	python$$version -c "" 2>/dev/null && echo python$$version && break; done),python3.11)
BIN := .venv/bin
# The lock of the Python that .venv has, or will have.
LOCK = requirements$(patsubst -3.11,,$(shell $(or $(wildcard $(BIN)/python),$(PYTHON)) \
	-c "import sys; print('-%d.%d' % sys.version_info[:2])")).lock
STORAGE ?= runs
# Where `make serve` looks for champions: the sweeps' store, once there is one.
REGISTRY = $(or $(MLFLOW_TRACKING_URI),$(if $(wildcard $(STORAGE)/mlflow.db),sqlite:///$(abspath $(STORAGE))/mlflow.db))

# One thread per process: on few cores more of them only wait for each other.
export OMP_NUM_THREADS := 1
# Of a process that crashes after pytest has let go of it, all that is known is what it says itself.
export PYTHONFAULTHANDLER := 1

# Two workers, with what needs Ray in one of them.
IN_TWO := $(BIN)/pytest -n 2 --dist loadgroup --no-loadscope-reorder --durations=25

# Routers of others, for benchmarks/rival_parity.py: an environment each, as two of them share a script's name.
RIVALS := $(or $(TOKENYARD_RIVALS),.rivals)

# Clients of others, for tests/integration/serve/test_clients.py: an environment each, as they pin other versions.
CLIENTS := $(or $(TOKENYARD_CLIENTS),.clients)

# What the policy plugs into, for tests/integration/plugs: an environment each.
PLUGS := $(or $(TOKENYARD_PLUGS),.plugs)

# Engines of others, for tests/engines: an environment each.
ENGINES := $(or $(TOKENYARD_ENGINES),.engines-real)

# What builds the site: an environment of its own, as nothing else needs it.
DOCS := $(or $(TOKENYARD_DOCS),.docs)

# What documents tell a reader to type, which `make docs` runs.
BLOCKS := tests/integration/shared/test_document_blocks.py

.PHONY: docs sweep kernels test test-all test-recorded test-cluster test-engines claims drills check serve demo mlflow figures bench install install-locked sbom audit test-plugs rivals clients plugs engines-real
.DEFAULT_GOAL := sweep

# Modules are compiled when they are first imported: most of what Ray, torch and MLflow bring never is.
export PIP_NO_COMPILE := 1

# Versions are the lock's. Its hashes are left out: pip would then refuse the project itself, and other platforms.
PIP_INSTALL := $(BIN)/pip install --quiet --constraint .venv/constraints.txt

.venv/constraints.txt: $(wildcard requirements*.lock)
	test -d .venv || $(PYTHON) -m venv .venv
	sed -nE 's/^([a-z0-9.-]+==[^ ]+).*/\1/p' $(LOCK) > $@

.venv/.core: pyproject.toml .venv/constraints.txt
	$(PIP_INSTALL) --editable ".[serve,train]"
	touch $@

.venv/.engines: pyproject.toml .venv/.core
	$(PIP_INSTALL) --editable ".[all]"
	touch $@

.venv/.dev: pyproject.toml .venv/.core
	$(PIP_INSTALL) --editable ".[dev]"
	touch $@

install: .venv/.dev ## Everything a developer needs.

install-locked: .venv/constraints.txt ## The same on Linux x86_64, with every hash checked but torch's.
	$(PIP_INSTALL) torch
	grep -v '^torch==' $(LOCK) > .venv/hashed.txt
	$(BIN)/pip install --quiet --no-deps --require-hashes --requirement .venv/hashed.txt
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --editable .
	touch .venv/.core .venv/.engines .venv/.dev

sbom: .venv/.dev ## Bill of materials of what is installed here: sbom.json, CycloneDX.
	test -x .venv/tools/bin/cyclonedx-py || $(PYTHON) -m venv .venv/tools
	.venv/tools/bin/pip install --quiet cyclonedx-bom
	.venv/tools/bin/cyclonedx-py environment --output-reproducible --output-file sbom.json $(BIN)/python

audit: .venv/constraints.txt ## Known weaknesses of what the lock names; asks pypi.org, and fails where it does not answer.
	test -d .venv/tools || $(PYTHON) -m venv .venv/tools
	.venv/tools/bin/pip install --quiet pip-audit
	grep -v "^torch==" $(LOCK) > .venv/hashed.txt
	.venv/tools/bin/pip-audit --strict --no-deps --disable-pip --requirement .venv/hashed.txt

sweep: .venv/.core ## Train, compare, keep the best: the main job.
	$(BIN)/python pipelines/sweep.py --storage $(STORAGE)

kernels: .venv/.dev ## Compile now what else the first test of each kind would.
	$(BIN)/python -m tokenyard.compiled

test: kernels ## At every change: what starts no process, and one of each kind that does.
	$(IN_TWO)

test-all: kernels ## Before a change lands: all but the cluster, at full size; last what needs the machine.
	-$(MAKE) --keep-going plugs  # What needs them skips where no index has them.
	$(IN_TWO) --hypothesis-profile=thorough -m "not (integration or cluster or engines)"
	$(BIN)/pytest --durations=25 --hypothesis-profile=thorough -m "integration and not cluster" --ignore=$(BLOCKS)

test-recorded: kernels ## What reads published traces, which others skip: TOKENYARD_DATA is the folder that has them.
	$(IN_TWO) --hypothesis-profile=thorough -m recorded

rivals: $(patsubst rivals/%.txt,$(RIVALS)/%/.installed,$(wildcard rivals/*.txt)) ## What we are compared with: others' routers and proxy. In .rivals.

$(RIVALS)/%/.installed: rivals/%.txt
	test -d $(@D)/bin || $(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet --requirement $<
	touch $@

clients: $(patsubst clients/%.txt,$(CLIENTS)/%/.installed,$(wildcard clients/*.txt)) ## Clients that have to work as they are. 7 GB, in .clients.

$(CLIENTS)/%/.installed: clients/%.txt
	test -d $(@D)/bin || $(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet --requirement $<
	touch $@

plugs: $(patsubst plugs/%.txt,$(PLUGS)/%/.installed,$(wildcard plugs/*.txt)) $(PLUGS)/axe/.installed ## What the policy plugs into: Envoy; and what checks that the console is accessible. In .plugs.

# A script of axe-core: what the package needs to run a browser is left out.
$(PLUGS)/axe/.installed: .venv/.core
	$(BIN)/pip install --quiet --no-deps --target $(@D) axe-playwright-python==0.1.8
	touch $@

$(PLUGS)/%/.installed: plugs/%.txt
	test -d $(@D)/bin || $(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet --requirement $<
	touch $@

engines-real: $(patsubst engines-real/%.txt,$(ENGINES)/%/.installed,$(wildcard engines-real/*.txt)) ## Engines that have to work as they are: llama.cpp, and vLLM on CPU with Ray (2.7 GB). In .engines-real.

# A file names all that is installed: what wheels ask for beyond it does not fit, or has to be compiled.
# torch alone brings what it needs, which depends on the index.
$(ENGINES)/%/.installed: engines-real/%.txt
	test -d $(@D)/bin || $(PYTHON) -m venv $(@D)
	sed -n '/^torch==/p' $< | xargs -r $(@D)/bin/pip install --quiet
	$(@D)/bin/pip install --quiet --no-deps --requirement $<
	touch $@

$(DOCS)/.installed: docs/requirements.txt
	test -d $(@D)/bin || $(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet --requirement $<
	touch $@

docs: .venv/.dev $(DOCS)/.installed ## The site in site/, without a warning; its links lead somewhere, and its blocks run.
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict --quiet
	$(BIN)/pytest -m "" -rs --durations=10 tests/unit/shared/test_documents.py $(BLOCKS)

test-plugs: .venv/.dev plugs ## The picker behind a real Envoy.
	$(BIN)/pytest -m integration -rs --durations=10 tests/integration/plugs

test-engines: .venv/.dev $(ENGINES)/llamacpp/.installed ## A gateway before llama.cpp, and before vLLM where `make engines-real` has installed it.
	$(BIN)/pytest -m engines -rs --durations=10 tests/engines

test-cluster: .venv/.dev ## cluster.yaml on hosts made of namespaces: needs root, sshd and rsync.
	$(BIN)/pytest -m cluster -rs tests/cluster

claims: .venv/.dev .venv/.engines $(ENGINES)/llamacpp/.installed ## Repeat long studies whose results stand in docs: an hour of faults, the law, the arena with 30 streams, the data path.
	$(BIN)/python benchmarks/soak.py --cluster emulated --minutes 60
	$(BIN)/python benchmarks/never_worse.py --json $(STORAGE)/never_worse.json
	PYTHONPATH=.:tests $(BIN)/python tests/engines/sim_to_real.py --json $(STORAGE)/sim_to_real.json
	$(BIN)/python pipelines/arena.py --full --json $(STORAGE)/arena.json
	$(BIN)/python benchmarks/gateway_throughput.py --json $(STORAGE)/gateway_throughput.json

drills: .venv/.dev ## Break the policy in twelve ways and the system in five, under load.
	$(BIN)/pytest -m drills -rA --no-header tests/drills

check: .venv/.dev ## Lint, format, types, layers, words, size, lock.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python .ci/check_words
	$(BIN)/python .ci/size
	$(BIN)/python .ci/lock

serve: .venv/.engines ## A small model on this machine behind the gateway, on 127.0.0.1:8000. POLICY=candidate: what was swept last.
	TOKENYARD_LOCAL_ADMIN=1 $(BIN)/python pipelines/deploy.py $(addprefix --registry ,$(REGISTRY)) $(addprefix --policy ,$(POLICY))

demo: .venv/.engines ## Three policies route live traffic over an emulated fleet, in three minutes, with a picture.
	$(BIN)/python pipelines/replay.py --url emulated --rate 14 --length-scale 0.05 --duration-s 9 \
		--compare champion,sed,ray_default --baseline ray_default --figure $(STORAGE)/demo.png

mlflow: .venv/.core ## Look at the sweeps on http://127.0.0.1:5000; it prints the page of the last one.
	$(BIN)/python -m tune_configs.mlflow_server $(STORAGE)

figures: .venv/.dev .venv/.engines ## Draw all figures, write README's gains and the notebooks, and record the console: needs chromium and its driver; eight minutes.
	$(BIN)/python docs/figures/draw.py
	$(BIN)/python .ci/notebooks
	$(BIN)/python docs/figures/record_console.py

bench: .venv/.dev ## How fast it is, beside a peer, in one run.
	$(BIN)/python benchmarks/env_throughput.py
	$(BIN)/python benchmarks/decision_latency.py
