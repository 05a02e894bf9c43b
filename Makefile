# Every target sets up what it needs; a second run of a target finds it done and starts at once.
PY := .venv/bin/python
CC ?= gcc
PRELOAD_SOURCES := $(wildcard csrc/job/*.c) csrc/common/vma.c
CSRC_HEADERS := $(wildcard csrc/*/*.h csrc/*/*/*.h)
HELPER_SOURCES := $(addprefix csrc/,uffd_helper.c service/residency.c service/warm.c service/bpf_ring.c \
	service/names.c service/listing.c)
POOL_SOURCES := $(wildcard csrc/service/pool/*.c csrc/service/net/*.c) $(addprefix csrc/,uffd_helper.c service/residency.c \
	service/closing.c)
PATHS_SOURCES := $(wildcard csrc/service/path*.c)
REPLAY_SOURCES := $(wildcard csrc/replay/*.c) $(PATHS_SOURCES) $(addprefix csrc/service/,profile.c memory.c net/checksum.c)
READS_SOURCES := $(wildcard csrc/service/reads*.c)
COMPARE_SOURCES := $(addprefix csrc/service/,compare.c checker.c) $(POOL_SOURCES)
SANITIZE_CFLAGS := -std=gnu11 -g -O1 -fno-omit-frame-pointer -Icsrc -Wall -Wextra -pthread
SANITIZE_asan := -fsanitize=address,undefined -fno-sanitize-recover=all
SANITIZE_tsan := -fsanitize=thread

# Hundreds of interpreters start in a run of the tests: they must not compile each module anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: all setup setup-test setup-all demo apps test test-all check lint pure campaign hammer cluster lustre \
	manual site release asan tsan clean

all: setup

# What uffdprefetch and its demo need. What only tests need is asked for by them.
setup:
	@tools/setup.sh run

setup-test:
	@tools/setup.sh test

setup-all:
	@tools/setup.sh all

demo: setup
	$(PY) -m uffdprefetch demo

# Tests wait more than they compute: twice as many at a time as there are processors. A file's go to one
# worker, and files are taken as they are collected (tests/conftest.py).
AT_A_TIME ?= $(shell echo $$((2 * $$(nproc))))
PYTEST_SIDE_BY_SIDE := $(PY) -m pytest -q --progress -n $(AT_A_TIME) --dist loadfile --no-loadscope-reorder

# Each promise once; then the rest: long matrices, chance, rare tools, guests, sanitizers. tests/README.md
# has what is where, and why.
test: setup-test
	$(PYTEST_SIDE_BY_SIDE) -m "not long" --durations=10

test-all: setup-all
	UFFDPREFETCH_TEST_MODEL_OPERATIONS=5000 $(PYTEST_SIDE_BY_SIDE) -m long --durations=25

# Real programs in small, under wrap and not: installs their libraries (1 GB), then prints the table.
apps:
	@tools/setup.sh apps
	$(PY) bench/apps.py --size small --slow

# The service killed and agents made to end, 200 times each; changes past every library, and how often
# the last act of ours hits them. `make test-all` does it a few times.
campaign: setup-test
	UFFDPREFETCH_TEST_RAW_OPERATIONS=100000 UFFDPREFETCH_TEST_RACES=1000000 \
		UFFDPREFETCH_TEST_SEED=$$(date +%s) UFFDPREFETCH_TEST_LIMIT_SECONDS=90000 \
		$(PY) -m pytest -s tests/faults/test_mapping_model.py -k 'raw_system_calls or past_every_library'
	UFFDPREFETCH_TEST_HOOK_TRIALS=100 UFFDPREFETCH_TEST_LIMIT_SECONDS=9000 \
		$(PY) -m pytest -s tests/faults/test_memory_hooks.py -k random_moments
	UFFDPREFETCH_TEST_START_KILLS=500 UFFDPREFETCH_TEST_LIMIT_SECONDS=9000 \
		$(PY) -m pytest -s tests/faults/test_start_kills.py -k any_moment
	$(PY) -m tests.campaign --kills 200
	$(PY) -m tests.campaign --kills 40 --engine cache-plan --per-state 5
	$(PY) -m tests.campaign --kills 40 --engine pool-plan --per-state 5

# Every word that readers get from a pool that is too small, 10^9 of them with each size of pages.
# Several minutes each; as root.
hammer: setup-test
	$(PY) -m tests.support.pool_hammer
	$(PY) -m tests.support.pool_hammer --huge-pages
	$(PY) -m tests.support.pool_hammer --spill $${TMPDIR:-/tmp}
	$(PY) -m tests.support.pool_hammer --plan 10
	$(PY) -m tests.support.pool_hammer --plan 10 --huge-pages
	$(PY) -m tests.support.pool_hammer --plan 8 --kill

# What may happen to the nodes of a run while they read from each other: each thing ten times. As root,
# half an hour. MPI of another make: tests/support/losses.py --python.
cluster: setup-test
	$(PY) -m tests.support.losses --times 10

# The tests on a real Lustre client, in a guest whose image UFFDPREFETCH_LUSTRE names (docs/lustre.md).
lustre: setup-test
	$(PY) -m tests.lustre.guest

# Before each commit: under a minute on two cores.
check: setup-test
	@$(MAKE) --no-print-directory -j2 lint pure

# The documents as a site, in build/site.
site:
	python3 -m venv build/site-venv
	build/site-venv/bin/pip install -q mkdocs-material
	build/site-venv/bin/mkdocs build -q --strict -f tools/mkdocs.yml

# The sdist and the wheel, built and checked, in dist/.
release:
	tools/release.sh

# The manual pages and completions in share/, from the command line's parsers.
manual: setup-test
	$(PY) tools/manual.py

lint: setup-test
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	.venv/bin/lint-imports --no-cache
	$(PY) -m mypy

# What is a function of its arguments: no privilege, no storage, no other process of ours.
pure: setup-test
	$(PY) -m pytest -q --pure -n 2 -m "not slow and not torch" tests/unit tests/net

# The slow storage bed of the tests, the demo and the benches (see bench/slowfs.c).
SLOWFS = bench/slowfs.c bench/slowfs_link.c bench/slowfs_control.c
build/slowfs: $(SLOWFS) bench/slowfs.h bench/slowfs_queue.h
	@mkdir -p build
	$(CC) -std=gnu11 -O2 -g -Wall -Wextra -pthread $$(pkg-config --cflags fuse3) $(SLOWFS) -o $@ \
		$$(pkg-config --libs fuse3)

# The C under sanitizers: the preload object, a job for it, and the service's part as a program of
# its own. tests/faults/test_sanitizers.py runs them. Moved into place, since two may build at once.
asan tsan: %: build/%/preload.so build/%/preload_stress build/%/helper_stress build/%/pool_stress \
	build/%/pool_trouble build/%/net_stress build/%/compare_stress build/%/cond_stress build/%/opens_stress \
	build/%/paths_stress build/%/reads_stress \
	build/%/replay build/%/profile_fuzz

# As setup.py builds it, but with the agent as an ordinary thread: the sanitizers' run-times need the
# thread-local storage that the freestanding agent does without.
build/%/preload.so: $(PRELOAD_SOURCES) $(CSRC_HEADERS)
	@mkdir -p $(@D)
	$(CC) $(SANITIZE_CFLAGS) $(SANITIZE_$*) -fPIC -shared -fvisibility=hidden -Wl,-z,now \
		-DUP_AGENT_PTHREAD $(PRELOAD_SOURCES) -o $@.$$$$ && mv $@.$$$$ $@

build/%/preload_stress build/%/cond_stress build/%/opens_stress: tests/programs/preload_stress.c \
		tests/programs/cond_stress.c tests/programs/opens_stress.c $(CSRC_HEADERS)
	@mkdir -p $(@D)
	for name in preload_stress cond_stress opens_stress; do \
		$(CC) $(SANITIZE_CFLAGS) $(SANITIZE_$*) tests/programs/$$name.c -o $(@D)/$$name.$$$$ && \
			mv $(@D)/$$name.$$$$ $(@D)/$$name || exit 1; \
	done

build/%/helper_stress: tests/programs/helper_stress.c $(HELPER_SOURCES) $(CSRC_HEADERS)
	@mkdir -p $(@D)
	$(CC) $(SANITIZE_CFLAGS) $(SANITIZE_$*) $< $(HELPER_SOURCES) -o $@.$$$$ && mv $@.$$$$ $@

build/%/pool_stress build/%/pool_trouble: $(wildcard tests/programs/pool_*) $(POOL_SOURCES) $(CSRC_HEADERS)
	@mkdir -p $(@D)
	for name in pool_stress pool_trouble; do \
		$(CC) $(SANITIZE_CFLAGS) $(SANITIZE_$*) tests/programs/$$name.c $(POOL_SOURCES) \
			-o $(@D)/$$name.$$$$ && mv $(@D)/$$name.$$$$ $(@D)/$$name || exit 1; \
	done

build/%/net_stress: tests/programs/net_stress.c tests/programs/pool_client.h $(POOL_SOURCES) $(CSRC_HEADERS)
	@mkdir -p $(@D)
	$(CC) $(SANITIZE_CFLAGS) $(SANITIZE_$*) -Wl,--wrap=pool_pin_for_others $< $(POOL_SOURCES) \
		-o $@.$$$$ && mv $@.$$$$ $@

build/%/compare_stress: tests/programs/compare_stress.c $(COMPARE_SOURCES) $(CSRC_HEADERS)
	@mkdir -p $(@D)
	$(CC) $(SANITIZE_CFLAGS) $(SANITIZE_$*) $< $(COMPARE_SOURCES) -o $@.$$$$ && mv $@.$$$$ $@

build/%/paths_stress: tests/programs/paths_stress.c $(PATHS_SOURCES) $(CSRC_HEADERS)
	@mkdir -p $(@D)
	$(CC) $(SANITIZE_CFLAGS) $(SANITIZE_$*) $< $(PATHS_SOURCES) -o $@.$$$$ && mv $@.$$$$ $@

build/%/replay: $(REPLAY_SOURCES) $(CSRC_HEADERS)
	@mkdir -p $(@D)
	$(CC) $(SANITIZE_CFLAGS) $(SANITIZE_$*) $(REPLAY_SOURCES) -o $@.$$$$ && mv $@.$$$$ $@

build/%/profile_fuzz: tests/programs/profile_fuzz.c $(REPLAY_SOURCES) $(CSRC_HEADERS)
	@mkdir -p $(@D)
	$(CC) $(SANITIZE_CFLAGS) $(SANITIZE_$*) $< $(filter-out csrc/replay/replay.c,$(REPLAY_SOURCES)) -o $@.$$$$ && mv $@.$$$$ $@

build/%/reads_stress: tests/programs/reads_stress.c $(READS_SOURCES) $(CSRC_HEADERS)
	@mkdir -p $(@D)
	$(CC) $(SANITIZE_CFLAGS) $(SANITIZE_$*) $< $(READS_SOURCES) -o $@.$$$$ && mv $@.$$$$ $@

clean:
	rm -rf build dist .venv *.egg-info .pytest_cache .mypy_cache .ruff_cache
	rm -f uffdprefetch/*.so uffdprefetch/_replay
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
