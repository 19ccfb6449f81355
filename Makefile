# make demo   train on 2 x 2 processes and compare with one; make test   everything that CI checks.
PYTHON ?= python3
RUN := .venv/bin/python
# One thread a process: the processes share the cores.
DEMO := OMP_NUM_THREADS=1 $(RUN) -m torch.distributed.run --standalone

.PHONY: demo test format clean

.venv/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(RUN) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: .venv/.ready
	$(DEMO) --nproc-per-node 4 examples/train.py --dp 2 --cp 2 --steps 60 --seq-len 1024 --window 128 --metrics build/demo-2x2.jsonl
	$(DEMO) --nproc-per-node 1 examples/train.py --steps 60 --seq-len 1024 --window 128 --metrics build/demo-1x1.jsonl
	$(RUN) examples/compare.py build/demo-2x2.jsonl build/demo-1x1.jsonl

test: .venv/.ready
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m pyright
	OMP_NUM_THREADS=1 $(RUN) -m pytest

format: .venv/.ready
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

clean:
	rm -rf .venv build dist *.egg-info
