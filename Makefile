# make demo: train on this machine through summation servers.  make test: the test suite.
# make test-slow: the rest of it: full matrices, many seeds, whole trainings. make test-long: the largest cases of these.
# All create .venv and install what they need.
# torch comes from the index of its CPU builds; TORCH_INDEX= takes that of your own pip configuration instead. From PyPI,
# torch for Linux brings gigabytes of CUDA libraries.
# make torch-range: the backend of torch.distributed under the lowest and the highest torch that are supported, each in an
# environment of its own.
# make dist: the wheel and the source distribution in dist/, each tried in new environments with and without torch.
# make lowest-versions: tests of each part with the oldest releases of all requirements that pyproject.toml allows.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DOCS_STAMP := $(VENV)/.installed-docs

# Tests at a time: most wait for processes most of the time.
JOBS ?= 2
TORCH_RANGE ?= 2.8.0 2.15.0

CPU_TORCH_INDEX := https://download.pytorch.org/whl/cpu
TORCH_INDEX ?= $(CPU_TORCH_INDEX)

.PHONY: lock demo docs dist lowest-versions test test-slow test-long torch torch-range check lint types proto format clean install fuzz chaos

environment = test -x $(BIN)/pip || { $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	|| { echo "byteps_py needs Python 3.11 or newer; set PYTHON=…"; exit 1; }; $(PYTHON) -m venv $(VENV); }

# torch alone, and first: were its index one more beside PyPI, pip would turn to PyPI's torch when it does not answer.
# (1): an environment's folder of programs; (2): what pip is to install. Where it is there, nothing is asked for.
PIP_INSTALL := pip install --quiet --disable-pip-version-check
install_torch = $(1)/$(PIP_INSTALL) --no-deps $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX) --retries 1) $(2) \
	|| { echo "make: no torch from TORCH_INDEX=$(TORCH_INDEX). TORCH_INDEX= takes torch from the index of your own pip" \
	"configuration; PyPI's brings gigabytes of CUDA libraries"; exit 1; }

install: $(STAMP)

# What the images install, by version and hash. For Python 3.11, which they have.
LOCK := pip-compile --quiet --generate-hashes --allow-unsafe --strip-extras --no-header --no-annotate \
	--no-emit-index-url --no-emit-trusted-host --no-emit-find-links --no-emit-options
lock:
	@rm -rf build/lock && mkdir -p build && $(PYTHON) -m venv build/lock && build/lock/bin/pip install --quiet pip-tools
	@for image in server worker build; do \
		$(PYTHON) deploy/requirements.py $$image > build/lock/$$image.in && \
		build/lock/bin/$(LOCK) $$([ $$image = server ] || echo -c deploy/requirements-server.txt) \
			-o deploy/requirements-$$image.txt build/lock/$$image.in || exit 1; \
	done
	@$(PYTHON) deploy/requirements.py torch $(CPU_TORCH_INDEX) > build/lock/torch.txt \
		&& mv build/lock/torch.txt deploy/requirements-torch.txt

$(STAMP): pyproject.toml constraints.txt
	@$(environment)
	@$(call install_torch,$(BIN),-c constraints.txt torch)
	$(BIN)/$(PIP_INSTALL) -c constraints.txt -e '.[dev]'
	@touch $@

# The site of the documentation, in build/docs: build/docs/index.html is its first page. A warning is an error.
docs: $(DOCS_STAMP)
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going --conf-dir docs --doctree-dir build/doctrees . build/docs

$(DOCS_STAMP): $(STAMP)
	$(BIN)/$(PIP_INSTALL) -c constraints.txt -e '.[docs]'
	@touch $@

torch:
	@$(environment)
	@$(call install_torch,$(BIN),-c constraints.txt torch)

demo: install
	$(BIN)/python examples/demo.py

# Compiled modules are kept: a thousand processes are started, and each would compile ours again, 0.1 s of it.
test: install
	env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -n $(JOBS)

test-slow: install $(DOCS_STAMP)
	env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -n $(JOBS) -m "slow and not long"

test-long: install
	env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -n $(JOBS) -m long

torch-range: $(addprefix torch-,$(TORCH_RANGE))

torch-%: pyproject.toml
	test -x .venv-torch-$*/bin/pytest || { $(PYTHON) -m venv .venv-torch-$* \
		&& { $(call install_torch,.venv-torch-$*/bin,torch==$*); } \
		&& .venv-torch-$*/bin/$(PIP_INSTALL) torch==$* -e '.[dev]'; }
	.venv-torch-$*/bin/python -m pytest tests/torch/process_group/test_backend_matrix.py tests/torch/process_group/test_backend_examples.py \
		tests/parallel/test_fsdp_cache.py

# From the source distribution, so that a wheel has nothing that is only in this folder. Where an environment is needed,
# it is a new one: what is there already would hide a requirement that is not stated.
DIST := dist
DIST_TOOLS := build/dist/tools/bin
dist:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "byteps_py needs Python 3.11 or newer"; exit 1; }
	@rm -rf $(DIST) build/dist && mkdir -p build/dist && $(PYTHON) -m venv build/dist/tools
	@$(DIST_TOOLS)/$(PIP_INSTALL) build twine
	@$(DIST_TOOLS)/python -P -m build --outdir $(DIST) .
	@$(DIST_TOOLS)/python -P -m twine check --strict $(DIST)/*
	@for file in $(DIST)/*.whl $(DIST)/*.tar.gz; do \
		rm -rf build/dist/try && $(PYTHON) -m venv build/dist/try \
		&& build/dist/try/bin/$(PIP_INSTALL) "$$file" \
		&& build/dist/try/bin/python -P tests/programs/try_installation.py "$$file" \
		&& rm -rf build/dist/try && $(PYTHON) -m venv build/dist/try \
		&& { $(call install_torch,build/dist/try/bin,-c constraints.txt torch); } \
		&& build/dist/try/bin/$(PIP_INSTALL) -c constraints.txt "$$file[torch]" \
		&& build/dist/try/bin/python -P tests/programs/try_installation.py "$$file" || exit 1; \
	done
	@rm -rf build/dist

# torch first, for the reason above. Its CPU builds are in the same index for every release.
LOWEST := .venv-lowest/bin
lowest_torch = $$(sed -n 's/^torch = \["torch>=\([0-9.]*\),.*/\1/p' pyproject.toml)
lowest-versions: pyproject.toml
	@test -x $(LOWEST)/pytest || { rm -rf .venv-lowest && $(PYTHON) -m venv .venv-lowest \
		&& $(LOWEST)/$(PIP_INSTALL) uv \
		&& { $(call install_torch,$(LOWEST),torch==$(lowest_torch)); } \
		&& $(LOWEST)/uv pip install --quiet --python $(LOWEST)/python --resolution lowest-direct -e '.[dev]'; }
	@$(LOWEST)/uv pip list --quiet --python $(LOWEST)/python
	env -u PYTHONDONTWRITEBYTECODE $(LOWEST)/python -m pytest -n $(JOBS) $(LOWEST_TESTS)

# A folder or two for each requirement: numpy and numba; pyzmq, xxhash and cryptography; grpcio and protobuf; torch.
LOWEST_TESTS := tests/kernels tests/server tests/dataplane tests/wire tests/security tests/cli/test_cli_commands.py \
	tests/torch/process_group/test_backend_matrix.py

# Ten million seeded inputs, shared among all parsers and cores: minutes.
fuzz: install
	$(BIN)/python -m tests.fuzz --inputs 10000000

# Processes killed and frozen at random while a model trains: half an hour, and a report.
chaos: install
	$(BIN)/python -m tests.chaos --faults 500

check: lint types

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# mypy does not know setuptools' package-dir mapping: show it the tree as it is installed.
types: install
	@rm -rf build/types && mkdir -p build/types/byteps_py
	@ln -s $(CURDIR)/byteps_py/* $(CURDIR)/server $(CURDIR)/worker $(CURDIR)/proto build/types/byteps_py/
	cd build/types && $(CURDIR)/$(BIN)/mypy --config-file $(CURDIR)/pyproject.toml --cache-dir $(CURDIR)/.mypy_cache

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Regenerates proto/control_pb2*.py from proto/control.proto.
proto: install
	$(BIN)/python proto/generate.py

clean:
	rm -rf $(VENV) .venv-torch-* .venv-lowest build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
