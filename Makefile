# Every target sets up what it needs; a second run of a target finds it done and starts at once.
PY := .venv/bin/python
CC ?= gcc
PRELOAD_SOURCES := $(addprefix csrc/,preload.c mapping.c identity.c request.c agent.c checkpoint.c link.c)
CSRC_HEADERS := $(wildcard csrc/*.h)
# As setup.py builds the preload object, but with the agent as an ordinary thread: the sanitizers'
# run-time needs the thread-local storage that the freestanding agent does without.
SANITIZE_FLAGS := -std=gnu11 -g -O1 -fno-omit-frame-pointer -fPIC -shared -fvisibility=hidden \
	-DUP_AGENT_PTHREAD -Icsrc -Wall -Wextra -pthread

.PHONY: all setup demo test lint asan tsan clean

all: setup

setup:
	@tools/setup.sh

demo: setup
	$(PY) -m uffdprefetch demo

test: setup
	$(PY) -m pytest

lint: setup
	$(PY) -m ruff check .
	$(PY) -m mypy

# The slow storage bed of the tests, the demo and the benches (see bench/slowfs.c).
build/slowfs: bench/slowfs.c
	@mkdir -p build
	$(CC) -std=gnu11 -O2 -g -Wall -Wextra -pthread $$(pkg-config --cflags fuse3) $< -o $@ \
		$$(pkg-config --libs fuse3)

asan: build/asan/preload.so
tsan: build/tsan/preload.so

build/asan/preload.so: $(PRELOAD_SOURCES) $(CSRC_HEADERS)
	@mkdir -p $(@D)
	$(CC) $(SANITIZE_FLAGS) -fsanitize=address,undefined $(PRELOAD_SOURCES) -o $@

build/tsan/preload.so: $(PRELOAD_SOURCES) $(CSRC_HEADERS)
	@mkdir -p $(@D)
	$(CC) $(SANITIZE_FLAGS) -fsanitize=thread $(PRELOAD_SOURCES) -o $@

clean:
	rm -rf build dist .venv *.egg-info .pytest_cache .mypy_cache .ruff_cache
	rm -f uffdprefetch/*.so
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
