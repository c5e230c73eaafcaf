# Needs python3 and make. `make train` is the demonstration, `make test` the check of everything that is fast.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Virtual ranks run many small operators: torch's threads cost more than they give, the more so on a busy machine.
THREADS ?= 1
export OMP_NUM_THREADS := $(THREADS)

.PHONY: setup train test test-all test-hidden-state test-rules prove-rules least-sent test-faults test-faults-at-load test-fuzz test-shard-map test-memory test-scale test-redistribution test-tied-loops test-repeated-layers test-user-programs test-distributions test-random-bits test-eager-nn test-models operators lint format types bench bench-turns bench-peers bench-first-step bench-predictions notebook readme docs wheel clean test-slow
.DEFAULT_GOAL := test

setup: $(STAMP)

# One stamp stands for the whole environment: it is made again when what is to be installed has changed.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[examples,notebooks,safetensors,testing,dev]'
	touch $@

train: $(STAMP)
	$(BIN)/python examples/train_gpt.py $(ARGS)

# Files of tests run side by side, in so many processes: one more than cores, as some wait. A test that hangs fails, after
# so many seconds.
JOBS ?= 3
TIMEOUT ?= 400
test: lint types
	$(BIN)/python -m pytest -m 'not slow and not rules' --timeout $(TIMEOUT) --numprocesses $(JOBS) --dist loadfile

test-all: lint types
	$(BIN)/python -m pytest

# What takes more than a few seconds each, of which `make test` runs a sample.
test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow

test-rules: $(STAMP)
	$(BIN)/python -m pytest -m rules

# Every rule by execution; ARGS='--op softmax --handmade' for some, see docs/rules.md.
prove-rules: $(STAMP)
	$(BIN)/python -m proofs.rule_check $(ARGS)

# What plans of single operators send beside a lower bound of it; rewrites proofs/reports/least_sent.md.
least-sent: $(STAMP)
	for arguments in '--functions' '' '--backward --samples 2' '--ranks 4 --samples 2' '--mesh 2x2 --samples 2' \
	    '--uneven --samples 2'; do \
	    $(BIN)/python -W ignore -m proofs.least_sent $$arguments --markdown proofs/reports/least_sent.md || exit; \
	done

# Ranks that go wrong, and checkpoint writers that are killed, RUNS times each.
RUNS ?= 20
test-faults: $(STAMP)
	SPMD_FAULT_RUNS=$(RUNS) $(BIN)/python -m pytest -m faults tests

# The same beside busy processes; writes proofs/reports/faults.md. On two cores a run takes half an hour and more.
LOAD ?= 8
test-faults-at-load: $(STAMP)
	$(BIN)/python -m proofs.faults_at_load --runs $(RUNS) --load $(LOAD) --markdown proofs/reports/faults.md

# Random whole programs, of which a quarter holds loops and branches, so many, against one device; and from outside of jit.
WHOLE_PROGRAMS ?= 5000
test-fuzz: $(STAMP)
	$(BIN)/python -m proofs.fuzz --seeds 0:$(WHOLE_PROGRAMS) --jobs $(JOBS)
	$(BIN)/python -m proofs.fuzz --seeds 0:$(WHOLE_PROGRAMS) --jobs $(JOBS) --outside

# Random programs with shard_map, so many, against a loop over ranks.
PROGRAMS ?= 10000
test-shard-map: $(STAMP)
	$(BIN)/python -m proofs.shard_map_fuzz random:$(PROGRAMS) --jobs $(JOBS)

# What gloo processes hold beside plan.memory; rewrites proofs/reports/memory_of_ranks.md. For one case, see the module's docstring.
test-memory: $(STAMP)
	$(BIN)/python -m proofs.memory_of_ranks --markdown proofs/reports/memory_of_ranks.md; \
	status=$$?; $(BIN)/python -m proofs.memory_of_ranks fsdp --limits 0.6 0.4 --markdown proofs/reports/memory_of_ranks.md && \
	exit $$status

# What jobs of 8 to 64 gloo processes cost each of them; rewrites proofs/reports/scale_of_jobs.md.
test-scale: $(STAMP)
	$(BIN)/python -m proofs.scale_of_jobs --markdown proofs/reports/scale_of_jobs.md

# Generated functions that read state which changes between calls, so many, against themselves on one device.
FUNCTIONS ?= 3000
test-hidden-state: $(STAMP)
	$(BIN)/python -m proofs.hidden_state --count $(FUNCTIONS)

# Every redistribution of meshes of up to 2 x 2 x 2 beside an optimum and torch's; rewrites proofs/reports/redistribution.md.
test-redistribution: $(STAMP)
	$(BIN)/python -m proofs.redistribution --jobs $(JOBS) --markdown proofs/reports/redistribution.md

# Plans of 200 small programs with loops beside the optimum of the unrolled ones: some minutes.
test-tied-loops: $(STAMP)
	$(BIN)/python -m proofs.tied_loops

# Random programs with equal layers, so many, planned layer by layer and with equal layers planned once, both against one
# device; and small ones beside the optimum with tied layers: half an hour.
LAYERED ?= 300
test-repeated-layers: $(STAMP)
	$(BIN)/python -m proofs.repeated_layers --seeds 0:$(LAYERED) --tied 200 --jobs $(JOBS) $(ARGS)

# Scripts as people write them, twice in one namespace, beside one device: ARGS='llama ppo' for some.
test-user-programs: $(STAMP)
	$(BIN)/python -m proofs.user_programs $(ARGS)

# Every distribution of torch, its errors and its derivatives, beside one device.
test-distributions: $(STAMP)
	$(BIN)/python -m proofs.distributions

# What Debian's dieharder says of 1 GB of the words of each generator, of one key, split keys and folded keys: some hours.
test-random-bits: $(STAMP)
	$(BIN)/python -m proofs.dieharder --markdown proofs/reports/random_bits.md $(ARGS)

# Stock models beside one device, and what needs transformers; writes proofs/reports/models.md.
$(VENV)/.models: $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[models]'
	touch $@

test-models: $(VENV)/.models
	$(BIN)/python -m pytest tests/api/test_transformers_specs.py tests/api/test_transformers_containers.py \
	    tests/api/test_functional_optimizers.py tests/api/test_materialized_models.py
	$(BIN)/python -m proofs.models --markdown proofs/reports/models.md
	$(BIN)/python -m proofs.models --routes --markdown proofs/reports/models.md

# Rewrites proofs/reports/operators.md with what the sweeps over torch's operators and modules find.
operators: $(STAMP)
	$(BIN)/python -m proofs.op_sweep --markdown proofs/reports/operators.md
	$(BIN)/python -m proofs.nn_sweep --markdown proofs/reports/operators.md
	$(BIN)/python -m proofs.eager_nn_sweep --markdown proofs/reports/operators.md

# Modules, optimizers and distributions on DTensors outside of jit, beside one device: ARGS='--name optim' for some.
test-eager-nn: $(STAMP)
	$(BIN)/python -m proofs.eager_nn_sweep $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(STAMP)
	$(BIN)/mypy

bench: $(STAMP)
	$(BIN)/python benchmarks/comms.py
	$(BIN)/python benchmarks/planner.py $(ARGS)
	$(BIN)/python benchmarks/import_time.py
	$(BIN)/python benchmarks/call_overhead.py
	$(BIN)/python benchmarks/call_checks.py
	$(BIN)/python benchmarks/eager_overhead.py
	$(BIN)/python benchmarks/step_time.py
	$(BIN)/python benchmarks/virtual_ranks.py
	$(BIN)/python benchmarks/rank_overhead.py
	$(BIN)/python benchmarks/loops.py

# The processor time of this version beside that of a commit or folder, in turns: ARGS='call_overhead eager_overhead:mm'.
OLD ?= HEAD
bench-turns: $(STAMP)
	$(BIN)/python benchmarks/turns.py --old $(OLD) $(ARGS)

# A training step beside DDP, FSDP2 and parallelize_module: ARGS='--strategies dp --sizes 128x16' for some of the cases,
# ARGS='--link 1Gbit' on links of a rate.
bench-peers: $(STAMP)
	$(BIN)/python benchmarks/peers.py $(ARGS)

# The first step of a deep model, compilation included, beside torch.compile, and JAX with ARGS='--jax PYTHON'; 10 minutes.
bench-first-step: $(STAMP)
	$(BIN)/python benchmarks/first_step.py --markdown proofs/reports/performance.md $(ARGS)

# The predicted time of a step beside the measured one, for plans of many kinds; 3 minutes for each width and batch.
bench-predictions: $(STAMP)
	$(BIN)/python benchmarks/predictions.py --markdown proofs/reports/performance.md $(ARGS)

notebook: $(STAMP)
	$(BIN)/python -m pytest tests/test_notebooks.py

# Rewrites the outputs that stand in README.md with what its blocks print now.
readme: $(STAMP)
	$(BIN)/python tests/test_readme.py

# The site, build/site/index.html: pages, notebooks as they run now, reference. A warning, such as of a dead link, is an error.
docs: $(VENV)/.installed-docs
	$(BIN)/python -m sphinx --fail-on-warning --keep-going -c docs -d build/doctrees . build/site

$(VENV)/.installed-docs: $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs,notebooks,safetensors]'
	touch $@

wheel: $(STAMP)
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find spmd tests examples benchmarks -name __pycache__ -prune -exec rm -rf {} +
