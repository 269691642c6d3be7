# make report   HF against SGLang on the embedded checkpoint: reports/*.html    (FRESH=1 captures again)
# make test     lint, types and tests; of what is proven many times over a sample (tests/README.md)
# make test-all the same with every test
# make lab      JupyterLab on notebooks/
# make bench    the figures of benchmarks/
# make pictures the README's pictures, from the report (needs Chromium)
# make lock     requirements.lock from pyproject.toml: locked versions stay where they can (UPGRADE=1 takes the newest)
# make clean    removes the environment, stored captures and reports

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
UV := $(VENV)/bin/uv
READY := $(VENV)/.ready
# Where bytecode may not be written, every process compiles both engines anew: 12 s of import.
unexport PYTHONDONTWRITEBYTECODE
# One import of each, beside each other, writes the bytecode that is needed: 20 s instead of 100 s for all packages.
WARM := PYTHONPATH=vlmlab/cpu_standin SGLANG_USE_CPU_ENGINE=1 $(VENV)/bin/python -c "import sglang.srt.managers.scheduler" \
	> /dev/null 2>&1 & $(VENV)/bin/python -c "import altair, ipykernel, jupyterlab, matplotlib.pyplot, pandas, papermill, \
	transformers.models.qwen2_vl.modeling_qwen2_vl, transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe, vlmlab.report, \
	vlmlab.cli" > /dev/null 2>&1; wait || true
export VLMLAB_CACHE := $(CURDIR)/.cache/captures

.PHONY: report test test-all lab bench pictures lock clean
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

# Versions without hashes: 9 kB that a reader can review, not 500 kB. A released file is not replaced in the public registry.
lock: $(UV)
	@$(UV) pip compile pyproject.toml --quiet --extra sglang --extra test --python-version 3.11 --universal \
		--no-annotate --custom-compile-command "make lock" --output-file requirements.lock $(if $(UPGRADE),--upgrade)

$(READY): pyproject.toml requirements.lock | $(UV)
	@echo "installing the packages of requirements.lock: about a minute and 11 GB"
	@$(UV) pip install --python $(VENV)/bin/python --exact --requirements requirements.lock --editable ".[sglang,test]" \
		|| { echo "$(VENV) is not ready: no network, a full disk, or a pyproject.toml that needs make lock" >&2; exit 1; }
	@echo "compiling what both engines import"
	@$(WARM)
	@touch $@

$(UV):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11) and "vlmlab needs Python 3.11; make PYTHON=/path/to/python3.11")'
	@echo "creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check uv==0.13.9 \
		|| { echo "$(VENV) is not ready: pip could not fetch uv; is there a network?" >&2; exit 1; }
