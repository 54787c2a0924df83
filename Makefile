# Three commands do everything on a fresh machine, set-up included:
#   make test   lint, types and tests
#   make demo   trains two small language models, and turns their dials: perplexity by experts per token
#   make docs   builds the documentation into site/
PYTHON ?= python3
VENV   ?= .venv
RUN    := $(VENV)/bin/python
STAMP  := $(VENV)/.installed
PIP    := $(RUN) -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt
# PyTorch without the CUDA libraries, which are gigabytes.
CPU    := https://download.pytorch.org/whl/cpu
# What compileall leaves out.
UNUSED := transformers/models/(?!auto|llama|olmoe|__init__)|/tests/|/(pip|fontTools|mypyc?|torchgen|selenium|material|griffe|pygments/lexers|torch/(onnx|testing))/

.PHONY: test demo docs lint types pytest clean help
.DEFAULT_GOAL := help

help:
	@sed -n '2,4s/^#   //p' Makefile

# Re-installed only when the project's requirements change.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "grmoe needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version). Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@echo "Setting up $(VENV) (about a minute, once)"
	@$(PYTHON) -m venv $(VENV)
	@command -v nvidia-smi >/dev/null || $(PIP) --no-deps --retries 1 --timeout 5 --index-url $(CPU) torch || true
	@$(PIP) -e '.[dev]'
	@# pip would compile on one core, and thousands of files that nothing here imports.
	@$(RUN) -m compileall -qq -j 2 -x '$(UNUSED)' $(VENV)/lib || true
	@touch $(STAMP)

lint: $(STAMP)
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .

types: $(STAMP)
	@$(RUN) -m mypy

# Types are checked beside the tests: these wait for processes a quarter of the time.
test: lint
	@$(MAKE) --no-print-directory --jobs 2 types pytest

pytest: $(STAMP)
	@$(RUN) -m pytest --numprocesses 2 --dist loadfile

demo: $(STAMP)
	@$(RUN) -m grmoe prepare --out runs/demo/data --tokenizer bpe:2048
	@echo "Two trainings side by side. The softmax model's is in runs/demo/softmax.log"
	@export OMP_NUM_THREADS=1; \
	$(RUN) -m grmoe train configs/demo.yaml out=runs/demo/softmax --resume model.router=softmax \
	  model.router_options.balance=true > runs/demo/softmax.log 2>&1 & other=$$!; trap "kill $$other 2>/dev/null" INT TERM; \
	$(RUN) -m grmoe train configs/demo.yaml out=runs/demo/grmoe --resume; mine=$$?; \
	wait $$other || { mine=$$?; tail -n 5 runs/demo/softmax.log; }; exit $$mine
	@$(RUN) -m grmoe dial runs/demo/softmax
	@$(RUN) -m grmoe dial runs/demo/grmoe --beside runs/demo/softmax
	@$(RUN) -m grmoe report runs/demo/grmoe runs/demo/softmax --out runs/demo/report.html

docs: $(STAMP)
	@NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --quiet
	@echo "Documentation: site/index.html"

clean:
	rm -rf $(VENV) runs site .pytest_cache .mypy_cache .ruff_cache .hypothesis
