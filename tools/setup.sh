#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Makes this checkout runnable: distribution packages (as root, with apt), .venv, the C objects, the
# slow storage bed. What cannot be had is named together with what that costs; only a missing
# interpreter or a failed C build stops the run. Repeating it is quick: each step has a stamp.
#
#   tools/setup.sh            SETUP_FORCE=1 tools/setup.sh   (forget the stamps)
#   tools/setup.sh --apps     also what the programs of bench/apps.py need: 0.6 GB
set -eu
cd "$(dirname "$0")/.."
apps=${1:-}
[ -z "$apps" ] || [ "$apps" = --apps ] || { echo "setup: unknown option $apps" >&2; exit 2; }

say() { printf 'setup: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }
# Content, not time stamps: a fresh clone and a git checkout change times at will.
hash_of() { cat "$@" 2>/dev/null | sha256sum | cut -d' ' -f1; }
stamp_is() { [ -z "${SETUP_FORCE:-}" ] && [ "$(cat "$1" 2>/dev/null)" = "$2" ]; }

# ---- 1. distribution packages -----------------------------------------------------------------
# package | how to see that it is there | what its absence costs
packages() {
    cat <<'LIST'
python3-venv|/usr/bin/python3 -c "import ensurepip, venv"|no .venv can be made: nothing runs
python3-dev|/usr/bin/python3 -c "import os, sysconfig as s; os.stat(s.get_path('include') + '/Python.h')"|the C helper cannot be built: nothing runs
gcc|command -v gcc|the C objects cannot be built: nothing runs
libc6-dev|test -e /usr/include/stdio.h|the C objects cannot be built: nothing runs
make|command -v make|no make targets
pkg-config|command -v pkg-config|the slow storage bed cannot be built: demo uses the local disk, bed tests skip
libfuse3-dev|pkg-config --exists fuse3|the slow storage bed cannot be built: demo uses the local disk, bed tests skip
fuse3|command -v fusermount3|the slow storage bed cannot be mounted unprivileged: demo uses the local disk
bindfs|command -v bindfs|not seen that nodes meet where clients keep names in mind
musl-tools|command -v musl-gcc|not seen that programs of another C library are left alone
valgrind|command -v valgrind|not seen that programs under valgrind are left alone
clang|command -v clang|not seen that clang's sanitizers are left alone
gcc-aarch64-linux-gnu|command -v aarch64-linux-gnu-gcc|not seen that the preload object can be built for AArch64
libc6-dev-arm64-cross|test -e /usr/aarch64-linux-gnu/include/stdio.h|not seen that the preload object runs on AArch64
qemu-user-static|command -v qemu-aarch64-static|not seen that the preload object runs on AArch64
lmdb-utils|command -v mdb_dump|mdb_dump missing: its transparency tests skip
openmpi-bin|command -v mpirun|mpirun missing: MPI tests skip
libopenmpi-dev|command -v mpicc|mpi4py cannot be built: MPI tests skip
sqlite3|command -v sqlite3|sqlite3 missing: its transparency and lock tests skip
python3-bpfcc|/usr/bin/python3 -c "import bcc"|no BPF compiler: the kernel witness is missing, page-table events are used
linux-headers-amd64|[ -n "$(ls -d /lib/modules/$(uname -r)/build /usr/src/linux-headers-* 2>/dev/null)" ]|bcc cannot compile: the kernel witness is missing
strace|command -v strace|system-call tests skip
tmux|command -v tmux|terminal tests skip
zsh|command -v zsh|its completion is not tried
groff-base|command -v groff|the manual pages are not looked at
chromium|command -v chromium|the HTML report is not driven in a browser: its tests skip
chromium-driver|command -v chromedriver|the HTML report is not driven in a browser: its tests skip
util-linux|command -v setpriv|tests as an unprivileged user skip
vmtouch|command -v vmtouch|one peer is missing from the benches
fio|command -v fio|one peer is missing from the benches
LIST
    # Only for bench/apps.py.
    [ -z "$apps" ] ||
        printf '%s|%s|one program of bench/apps.py is missing\n' \
            kraken2 'command -v kraken2' mmseqs2 'command -v mmseqs' \
            ncbi-blast+ 'command -v blastn'
    # Named after clang's version; of Debian 12 where there is none yet.
    local clang
    clang=$(clang -dumpversion 2>/dev/null | cut -d. -f1) || true
    printf '%s|%s|%s\n' "libclang-rt-${clang:-14}-dev" \
        'clang -fsanitize=address -x c - -o /dev/null <<<"int main(void) { return 0; }"' \
        "not seen that clang's sanitizers are left alone"
    echo 'environment-modules|test -e /usr/share/modules/init/bash|the module file is not tried'
    printf '%s|%s|%s\n' golang-github-containers-common \
        'test -e /usr/share/containers/seccomp.json' "no tests under a container's seccomp filter" \
        python3-seccomp '/usr/bin/python3 -c "import seccomp"' \
        "no tests under a container's seccomp filter"
    # Only where an image of a Lustre client is to be started (docs/lustre.md).
    [ -z "${UFFDPREFETCH_LUSTRE:-}" ] ||
        echo 'qemu-system-x86|command -v qemu-system-x86_64|no tests on a Lustre client'
    # Only where one starts a Slurm to test with (docs/slurm.md).
    [ -z "${UFFDPREFETCH_SLURMBED:-}" ] ||
        printf '%s|%s|no tests under Slurm\n' slurm-wlm 'command -v slurmd' \
            munge 'command -v munged' iproute2 'command -v ip' \
            libslurm-dev 'test -e /usr/include/slurm/spank.h'
}

missing=() costs=()
find_missing() {
    missing=() costs=()
    while IFS='|' read -r name check cost; do
        # The headers' package is called after the architecture; elsewhere than amd64 it differs.
        [ "$name" = linux-headers-amd64 ] && command -v dpkg >/dev/null &&
            name="linux-headers-$(dpkg --print-architecture)"
        if ! bash -c "$check" >/dev/null 2>&1; then
            missing+=("$name")
            costs+=("$name missing: $cost")
        fi
    done < <(packages)
}

apt_stamp=build/.setup-apt
mkdir -p build
find_missing
if [ ${#missing[@]} -gt 0 ]; then
    if [ "$(id -u)" != 0 ]; then
        say "not root: nothing is installed (as root: apt-get install ${missing[*]})"
    elif ! command -v apt-get >/dev/null; then
        say "no apt-get here: install by hand what is missing"
    elif stamp_is "$apt_stamp" "${missing[*]}"; then
        : # tried before and not available: do not ask the mirrors at every make
    else
        say "apt-get install ${missing[*]}"
        export DEBIAN_FRONTEND=noninteractive
        apt-get update -q >build/apt.log 2>&1 || say "apt-get update failed, see build/apt.log"
        if ! apt-get install -y -q --no-install-recommends "${missing[@]}" >>build/apt.log 2>&1; then
            # One unknown name makes apt refuse all of them: take them one by one.
            for name in "${missing[@]}"; do
                apt-get install -y -q --no-install-recommends "$name" >>build/apt.log 2>&1 ||
                    say "apt-get install $name failed, see build/apt.log"
            done
        fi
        find_missing
        printf '%s' "${missing[*]}" >"$apt_stamp"
    fi
    for cost in "${costs[@]}"; do say "$cost"; done
fi

# ---- 2. the virtual environment ---------------------------------------------------------------
# /usr/bin/python3 and not the first python3 of PATH: only the distribution's interpreter sees the
# distribution's bcc.
if [ ! -x .venv/bin/python ]; then
    if /usr/bin/python3 -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' \
        2>/dev/null; then
        /usr/bin/python3 -m venv --system-site-packages .venv
    elif python3 -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' 2>/dev/null
    then
        say "/usr/bin/python3 cannot make a venv, using $(command -v python3): its venv does not see" \
            "the distribution's bcc, so the kernel witness is missing"
        python3 -m venv --system-site-packages .venv
    else
        die "no Python >= 3.10 with venv and ensurepip: install python3-venv"
    fi
fi
pip() { .venv/bin/python -m pip --disable-pip-version-check "$@" 2>>build/pip.log >>build/pip.log; }

# What pyproject.toml asks for: of the package and all extras (everywhere) but those that are named
# "apps", or of these.
requirements() {
    .venv/bin/python - "$1" <<'PY'
import sys
try:
    import tomllib
except ModuleNotFoundError:
    from pip._vendor import tomli as tomllib
project = tomllib.load(open("pyproject.toml", "rb"))
extras = project["project"]["optional-dependencies"]
need = extras.pop("apps")
if sys.argv[1] == "everywhere":
    need = project["build-system"]["requires"] + project["project"]["dependencies"]
    need += [name for extra in extras.values() for name in extra]
print("\n".join(dict.fromkeys(need)))
PY
}
install() { # requirements of what, and what lacks without them
    local list need one
    list=$(requirements "$1")
    mapfile -t need <<<"$list"
    # --no-warn-conflicts: the distribution's own packages are visible and none of our business.
    pip install --no-warn-conflicts "${need[@]}" && return
    # One that cannot be built (mpi4py without MPI) must not cost the others.
    for one in "${need[@]}"; do
        pip install --no-warn-conflicts "$one" ||
            say "pip install '$one' failed (build/pip.log): $2"
    done
}

deps_stamp=.venv/.setup-deps
deps_hash=$(hash_of pyproject.toml tools/setup.sh)
if ! stamp_is "$deps_stamp" "$deps_hash"; then
    say "installing Python packages into .venv (log: build/pip.log)"
    : >build/pip.log
    # The package itself follows below, after its C sources.
    install everywhere "tests that need it skip"
    .venv/bin/python -c 'import cffi, rich, setuptools' ||
        die "cffi, rich and setuptools are needed and could not be installed, see build/pip.log"
    if ! .venv/bin/python -c 'import torch; assert torch.__version__.startswith("2.13.")' \
        2>/dev/null; then
        say "installing torch 2.13.0 (large; only tests use it)"
        pip install torch==2.13.0 ||
            say "pip install torch==2.13.0 failed (build/pip.log): the PyTorch DataLoader tests skip"
    fi
    printf '%s' "$deps_hash" >"$deps_stamp"
fi
if [ -n "$apps" ] && ! stamp_is .venv/.setup-apps "$deps_hash"; then
    say "installing the libraries of bench/apps.py into .venv (log: build/pip.log)"
    install apps "a program of bench/apps.py is left out"
    printf '%s' "$deps_hash" >.venv/.setup-apps
fi

# ---- 3. the package and its C objects ---------------------------------------------------------
if [ -e tools/cffi_build.py ] && [ -e csrc/job/preload.c ] && [ -e csrc/job/agent.c ]; then
    build_stamp=.venv/.setup-build
    build_hash=$(hash_of pyproject.toml setup.py tools/cffi_build.py $(find csrc -type f | sort))
    if ! stamp_is "$build_stamp" "$build_hash" ||
        ! .venv/bin/python -c 'import sys, importlib.util as u
sys.exit(not u.find_spec("uffdprefetch._preload"))' 2>/dev/null; then
        say "building the C objects and installing the package into .venv (log: build/build.log)"
        # --force: a changed header reaches cffi's object too, which does not list its headers.
        if ! .venv/bin/python setup.py build_ext --inplace --force >build/build.log 2>&1 ||
            ! .venv/bin/python -m pip --disable-pip-version-check install --no-deps \
                --no-build-isolation -e . >>build/build.log 2>&1; then
            tail -n 25 build/build.log >&2
            die "the build failed, see build/build.log"
        fi
        printf '%s' "$build_hash" >"$build_stamp"
    fi
else
    say "csrc/ or tools/cffi_build.py is not there: the package is not built"
fi

# ---- 4. the slow storage bed ------------------------------------------------------------------
if [ -e bench/slowfs.c ] && command -v gcc >/dev/null && pkg-config --exists fuse3 2>/dev/null; then
    if [ ! -e build/slowfs ] || [ bench/slowfs.c -nt build/slowfs ]; then
        make -s build/slowfs || say "build/slowfs failed to build: demo uses the local disk"
    fi
fi
