# make report   HF against SGLang on the embedded checkpoint: reports/*.html    (FRESH=1 captures again)
# make test     lint, types and tests; of what is proven many times over a sample (tests/README.md)
# make test-all the same with every test
# make lab      JupyterLab on notebooks/
# make bench    the figures of benchmarks/
# make pictures the README's pictures, from the report (needs Chromium)
# make clean    removes the environment, stored captures and reports

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
READY := $(VENV)/.ready
export VLMLAB_CACHE := $(CURDIR)/.cache/captures

.PHONY: report test test-all lab bench pictures clean
.DELETE_ON_ERROR:

report: $(READY)
	@$(VENV)/bin/vlmlab notebooks --out reports $(if $(FRESH),--fresh)

test-all: SELECTED := -m ""
test test-all: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
# Threads that spin while they wait would halve the other process; tests/conftest.py groups and orders the tests.
	OMP_WAIT_POLICY=passive $(VENV)/bin/pytest -n 2 --dist loadgroup --no-loadscope-reorder --durations=20 $(SELECTED)

lab: $(READY)
	$(VENV)/bin/jupyter lab notebooks

bench: $(READY)
	$(VENV)/bin/python benchmarks/compare_phases.py
	$(VENV)/bin/python benchmarks/hybrid.py
	$(VENV)/bin/python benchmarks/reveal.py
	$(VENV)/bin/python benchmarks/decode.py
	$(VENV)/bin/python benchmarks/grounding.py

pictures: report
	@mkdir -p data/pictures
	$(VENV)/bin/python -m data.make_pictures reports/report.html data/pictures

clean:
	rm -rf $(VENV) .cache reports

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11) and "vlmlab needs Python 3.11; make PYTHON=/path/to/python3.11")'
	@echo "creating $(VENV): about 3 minutes and 11 GB"
	@$(PYTHON) -m venv $(VENV)
	@$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --editable ".[sglang,test]"
	@touch $@
