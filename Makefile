# Everything here needs only Python >= 3.11 with venv, make and a package index.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --quiet --disable-pip-version-check
# A line for each package, without those for packages that are there already.
PIP_SHOWING := $(PY) -m pip install --disable-pip-version-check --progress-bar off
COMPILE := uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate \
  --custom-compile-command "make lock"
LOCKED := $(VENV)/.locked
READY := $(VENV)/.ready
FUZZER := $(VENV)/.fuzzer
COUNTER := $(VENV)/.counter
PAINTER := $(VENV)/.painter
TOOLS := .venv-tools
DOCKER ?= docker
PLATFORMS ?= linux/amd64,linux/arm64
BUILD_ARGS = --build-arg BASE=$(BASE) --build-arg VERSION=$(VERSION) --build-arg REVISION=$$(git rev-parse HEAD)
VERSION_OF = -c 'import platform; print(platform.python_version())'
WORKERS = $$($(PY) -c 'import os; print(min(6, 3 * (os.cpu_count() or 1)))')
VERSION = $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)

# Write bytecode even if PYTHONDONTWRITEBYTECODE is set: each worker of the tests would otherwise compile all of them.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := install
.PHONY: help install demo dev test thorough guard compiled long clients chaos canary hostile fuzz bench bench-tenants mutations sizes answers pictures check lint types contracts figures docs audit sbom dist image images pinned-base lock clean

# A target with `##` is in `make help`, in this order.
help:
	@sed -n -E 's/^([a-z-]+):.*## /\1\t/p' Makefile | expand -t 16

install: $(READY) ## install everything into .venv (the default)

demo: $(READY) ## run sample calls on embedded servers
	$(PY) -m openapi_tool demo

dev: $(READY) ## run embedded servers and an executor until Ctrl-C
	$(PY) -m openapi_tool dev $(DEV)

# Three workers for a core, as many tests wait; each has servers of its own.
# With GOGC, Helm, NATS and promtool look for garbage less often, for some MB; rendering the chart takes a quarter less.
PARALLEL = GOGC=400 $(PY) -m pytest --numprocesses $(WORKERS) --dist worksteal

test: $(READY) ## the tests, on real PostgreSQL and NATS
	$(PARALLEL) -m "not alone and not thorough and not long" $(TEST)

check: lint types contracts figures ## lint, format, types, import contracts, size of the code

# The tests that `make test` leaves out. What measures a time runs afterwards, alone.
thorough: $(READY) ## the tests that take longer
	$(PARALLEL) -m "thorough and not long"
	$(PY) -m pytest -m "alone and not long" $$(grep -rl --include='*.py' 'mark\.alone' tests)

# Those of them that guard the cost of a call by counts, which depend on no machine; CI runs them.
guard: $(READY) ## what a call may cost in instructions, messages and requests
	$(PY) -m pytest -m "alone and not long" tests/performance

# Bytecode of all tests, which otherwise each worker of `make test` makes for itself.
compiled: $(READY)
	$(PY) -m pytest --collect-only > /dev/null

# CPU of a call beside the floor; staged incidents: real servers, alerts in promtool, and what the commands say of each;
# the image's environment from a package index, whose packages `make test` copies from the virtual environment; all
# attacks with an eighth of their size.
long: $(READY) ## CPU of a call, staged incidents, all attacks, the image from a package index
	$(PY) -m pytest -m long tests/end_to_end/test_incidents.py tests/end_to_end/test_deployment.py \
	  tests/performance/test_guard.py tests/unit/test_isolation.py tests/hostile tests/gateway

# Clients of other projects, each in an environment of its own, as some need an older `mcp`. Needs npm and a package index.
CLIENTS := .clients
MCP_NPM := @modelcontextprotocol
clients: ## install MCP clients of other projects, which the tests of the gateway then use
	mkdir -p $(CLIENTS)/node
	npm install --no-fund --no-audit --prefix $(CLIENTS)/node node@22 $(MCP_NPM)/conformance@0.1.16 \
	  $(MCP_NPM)/inspector@2.12.0 conformance-2026@npm:$(MCP_NPM)/conformance@0.2.0-alpha.12
	for name in langchain mcpo mcp-2025-03-26 schemathesis; do $(PYTHON) -m venv $(CLIENTS)/$$name || exit 1; done
	$(CLIENTS)/langchain/bin/pip install --quiet langchain-mcp-adapters==0.3.2 "mcp<2"
	$(CLIENTS)/mcpo/bin/pip install --quiet mcpo==0.0.20 "mcp<2" fastapi==0.116.1
	$(CLIENTS)/mcp-2025-03-26/bin/pip install --quiet mcp==1.9.4 pydantic==2.11.7
	$(CLIENTS)/schemathesis/bin/pip install --quiet schemathesis==4.32.5

# Ten minutes of faults; for a shorter run: make chaos CHAOS="--calls 1000 --seed 4"; for partial failures:
# make chaos CHAOS="--profile cluster" (or failover, failover-hosts, pgbouncer, clocks, admin, files, limits, shape); for
# a kernel of the older protocol: make chaos CHAOS="--protocol v1r3"
chaos: $(READY) ## ten minutes of faults on three replicas, then a check of every call
	$(PY) -m tests.chaos.run $(CHAOS)

# Distinctive secrets in every place, a hostile script, and a search of every output; under a minute.
canary: $(READY) ## search every output for distinctive secrets
	$(PY) -m tests.canary.run

# Measure how each attack delays a quiet project; for less: make hostile HOSTILE="--only 13 --calls 20";
# for a kernel of the older protocol: make hostile HOSTILE="--protocol v1r3"
hostile: $(READY) ## measure the effect of each attack on another project
	$(PY) -m tests.hostile.run $(HOSTILE)
	$(PY) -m tests.hostile.doors

# Measure the cost of a call, compared with a minimal program; for less: make bench BENCH="--profile quick"
bench: $(READY) ## measure the cost of a call
	$(PY) -m benchmarks.run $(BENCH)

# Shares of projects that compete; for less: make bench-tenants BENCH="--only flood --seconds 15"
bench-tenants: $(READY) ## measure the shares of projects that compete
	$(PY) -m benchmarks.tenants $(BENCH)

# Five minutes on each target; for less: make fuzz FUZZ="--seconds 60 --only address". Needs Python 3.11 to 3.13.
fuzz: $(FUZZER) ## libFuzzer on six targets
	$(PY) -m tests.fuzz.run $(FUZZ)

# Remove each check that guards money, identity, secrets or loss in turn; its test must fail.
mutations: $(READY) ## remove each check in turn; its test must fail
	$(PY) -m scripts.mutate

# Measure how much of each recorded response a model is shown.
sizes: $(READY) ## measure how much of the upstream's responses a model is shown
	$(PY) -m scripts.answers sizes

# Compare the text for the model with that of Jina's MCP server, in exact tokens.
answers: $(COUNTER) ## compare the text for the model with that of Jina's MCP server
	$(PY) -m scripts.answers

# The pictures in the documents, from a run of two minutes; needs Debian's prometheus and chromium.
pictures: $(PAINTER) ## draw docs/pictures
	$(PY) -m scripts.pictures

lint: $(READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: $(READY)
	$(PY) -m mypy

contracts: $(READY)
	$(PY) -c "from importlinter.cli import lint_imports_command; lint_imports_command()"

# Size of the code; before and after a change: make figures FIGURES="--against REV"
figures: $(READY) ## size of the code before and after a change
	$(PY) -m scripts.figures --check $(FIGURES)

# Without PYTHON the virtual environment stays what it is; with it, one of another version is made again.
ifneq ($(origin PYTHON),file)
ifneq ($(shell $(PYTHON) $(VERSION_OF) 2>/dev/null),$(shell $(PY) $(VERSION_OF) 2>/dev/null))
.PHONY: $(LOCKED)
endif
endif

# The virtual environment, made again when the lock file changes; then the project itself in it.
$(LOCKED): requirements-dev.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "openapi-tool needs Python >= 3.11; name one with: make PYTHON=python3.11"; exit 1; }
	@test ! -L $(VENV) || { \
	  echo "$(VENV) is a link: remove it, or the folder behind it would be emptied for a new environment"; exit 1; }
	@echo "Creating $(VENV)"
	@$(PYTHON) -m venv --clear $(VENV)
	@echo "Installing $$(grep -c == requirements-dev.lock) packages into $(VENV); the first time this takes a minute or two"
	@$(PIP) --require-hashes -r requirements-build.lock
	@$(PIP_SHOWING) --require-hashes --no-build-isolation -r requirements-dev.lock
	@touch $(LOCKED)

$(READY): $(LOCKED) pyproject.toml
	@echo "Installing openapi-tool itself"
	@$(PIP) --no-deps --no-build-isolation --editable .
	@touch $(READY)
	@echo "Ready: $(VENV)/bin/openapi-tool --help"

# No extras of the package, as only make needs them. atheris has no wheel for every Python version; the tests replay the
# stored corpora without it, and estimate tokens.
$(FUZZER): $(READY)
	$(PIP) "atheris>=3,<4; python_version < '3.14'"
	@touch $(FUZZER)

$(COUNTER): $(READY)
	$(PIP) 'toktok-rs>=0.3,<0.4'
	@touch $(COUNTER)

$(PAINTER): $(READY)
	$(PIP) --no-build-isolation --editable '.[plot]'
	@touch $(PAINTER)

docs: $(READY) ## write the documents that come from the code
	$(PY) -m scripts.docs

# Known vulnerabilities of what is locked; where the data cannot be reached it fails with its own code (3).
audit: $(READY) $(TOOLS)/.ready ## look up known vulnerabilities of the locked packages
	$(PY) -m scripts.packages audit $(TOOLS)/bin/pip-audit

sbom: $(READY) ## write dist/openapi-tool.cdx.json
	$(PY) -m scripts.packages sbom

$(TOOLS)/.ready:
	$(PYTHON) -m venv --clear $(TOOLS)
	$(TOOLS)/bin/python -m pip install --quiet --disable-pip-version-check 'pip-audit>=2.9,<3'
	@touch $@

# The package: dist/*.whl and dist/*.tar.gz, built from what is locked; checked in an environment without anything else.
dist: $(READY) ## build and check the package
	rm -f dist/*.whl dist/*.tar.gz
	$(PY) -m scripts.dist

# The image, from a base that is pinned by its digest; needs an engine that builds (DOCKER=podman).
image: pinned-base ## build the container image
	$(DOCKER) build $(BUILD_ARGS) --tag openapi-tool:$(VERSION) .

# The same for several architectures, as one manifest, which only a registry can hold: IMAGE=registry.example.org/openapi-tool.
# The digest of BASE must be that of its manifest list.
images: pinned-base ## build and push it for several architectures
	@[ -n '$(IMAGE)' ] || { echo 'Name the image with its registry: make images IMAGE=registry.example.org/openapi-tool'; exit 1; }
	$(DOCKER) buildx build --platform $(PLATFORMS) $(BUILD_ARGS) --provenance=true --sbom=true --push \
	  --tag $(IMAGE):$(VERSION) .

pinned-base:
	@echo '$(BASE)' | grep -Eqx '[A-Za-z0-9][A-Za-z0-9._/:-]*@sha256:[0-9a-f]{64}' || { \
	  echo 'Name the base by its digest: make image BASE=python:3.11-slim-bookworm@sha256:…'; exit 1; }

# Needs uv (https://docs.astral.sh/uv/); nothing else does. The image serves every door, so it has the extra gateway.
lock: ## write the lock files (needs uv)
	$(COMPILE) --extra gateway pyproject.toml -o requirements.lock
	$(COMPILE) requirements-build.in -o requirements-build.lock
	$(COMPILE) --extra gateway --extra local --extra test -c requirements.lock -c requirements-build.lock \
	  pyproject.toml requirements-build.in -o requirements-dev.lock

clean: ## remove .venv and what tools have written
	rm -rf $(VENV) $(TOOLS) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
