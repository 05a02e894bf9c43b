#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Makes this checkout runnable: distribution packages (as root, with apt), .venv, the C objects, the
# slow storage bed. What cannot be had is named in one line with what that costs; only a missing
# interpreter or compiler and a failed C build stop the run. A step that is complete has a stamp and is
# not looked at again; one that is not is tried again by the next run, from where it failed.
#
#   tools/setup.sh run     what uffdprefetch and its demo need (make setup, make demo)
#   tools/setup.sh test    also what `make test` and `make check` need
#   tools/setup.sh all     also what `make test-all` needs: browser, cross-compiler, packagers' tools
#   tools/setup.sh apps    as test, and what the programs of bench/apps.py, harm.py and reads.py need: 1 GB
#
# SETUP_FORCE=1 forgets the stamps.
set -eu
cd "$(dirname "$0")/.."
level=${1:-run}
case $level in
run) levels="run" ;;
test) levels="run test" ;;
all) levels="run test all" ;;
apps) levels="run test apps" ;;
*) echo "setup: unknown level $level: run, test, all or apps" >&2 && exit 2 ;;
esac

say() { printf 'setup: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }
# Content, not time stamps: a fresh clone and a git checkout change times at will.
hash_of() { cat "$@" 2>/dev/null | sha256sum | cut -d' ' -f1; }
stamp_is() { [ -z "${SETUP_FORCE:-}" ] && [ "$(cat "$1" 2>/dev/null)" = "$2" ]; }
wanted() { [[ " $levels " == *" $1 "* ]]; }
mkdir -p build

# ---- 1. distribution packages -----------------------------------------------------------------
NOTHING="nothing can be built or run"
BED="\`make demo\` uses the local disk, tests on slow storage skip"
SKIP="the tests that need them skip" # each says so by name

# for whom | package | how to see that it is there | what its absence costs
packages() {
    local clang arch
    # Named after clang's version; of Debian 12 where there is none yet.
    clang=$(clang -dumpversion 2>/dev/null | cut -d. -f1) || true
    # The headers' package is called after the architecture.
    arch=$(dpkg --print-architecture 2>/dev/null || echo amd64)
    cat <<LIST
run|python3-venv|/usr/bin/python3 -c "import ensurepip, venv"|$NOTHING
run|python3-dev|/usr/bin/python3 -c "import os, sysconfig as s; os.stat(s.get_path('include') + '/Python.h')"|$NOTHING
run|gcc|command -v gcc|$NOTHING
run|libc6-dev|test -e /usr/include/stdio.h|$NOTHING
run|make|command -v make|no make targets
run|pkg-config|command -v pkg-config|$BED
run|libfuse3-dev|pkg-config --exists fuse3|$BED
run|fuse3|command -v fusermount3|$BED
test|lmdb-utils|command -v mdb_dump|$SKIP
test|sqlite3|command -v sqlite3|$SKIP
test|openmpi-bin|command -v mpirun|$SKIP
test|libopenmpi-dev|command -v mpicc|$SKIP
test|python3-bpfcc|/usr/bin/python3 -c "import bcc"|$SKIP
test|linux-headers-$arch|[ -n "\$(ls -d /lib/modules/\$(uname -r)/build /usr/src/linux-headers-* 2>/dev/null)" ]|$SKIP
test|strace|command -v strace|$SKIP
test|rsync|command -v rsync|$SKIP
test|tmux|command -v tmux|$SKIP
test|util-linux|command -v setpriv|$SKIP
test|iproute2|command -v ip|$SKIP
test|e2fsprogs|command -v mkfs.ext4|$SKIP
test|xfsprogs|command -v mkfs.xfs|$SKIP
test|bindfs|command -v bindfs|$SKIP
test|musl-tools|command -v musl-gcc|$SKIP
test|golang-github-containers-common|test -e /usr/share/containers/seccomp.json|$SKIP
test|python3-seccomp|/usr/bin/python3 -c "import seccomp"|$SKIP
all|valgrind|command -v valgrind|$SKIP
all|clang|command -v clang|$SKIP
all|libclang-rt-${clang:-14}-dev|clang -fsanitize=address -x c - -o /dev/null <<<"int main(void) { return 0; }"|$SKIP
all|gcc-aarch64-linux-gnu|command -v aarch64-linux-gnu-gcc|$SKIP
all|libc6-dev-arm64-cross|test -e /usr/aarch64-linux-gnu/include/stdio.h|$SKIP
all|qemu-user-static|command -v qemu-aarch64-static|$SKIP
all|chromium|command -v chromium|$SKIP
all|chromium-driver|command -v chromedriver|$SKIP
all|zsh|command -v zsh|$SKIP
all|groff-base|command -v groff|$SKIP
all|environment-modules|test -e /usr/share/modules/init/bash|$SKIP
all|vmtouch|command -v vmtouch|one peer is missing from the benches
all|fio|command -v fio|one peer is missing from the benches
apps|g++|command -v g++|two jobs of bench/harm.py are left out
apps|git|command -v git|a job of bench/harm.py is left out
apps|zstd|command -v zstd|a job of bench/reads.py is left out
apps|kraken2|command -v kraken2|a program of bench/apps.py is left out
apps|mmseqs2|command -v mmseqs|a program of bench/apps.py is left out
apps|ncbi-blast+|command -v blastn|a program of bench/apps.py is left out
LIST
    # Only where an image of a Lustre client is to be started (docs/lustre.md).
    [ -z "${UFFDPREFETCH_LUSTRE:-}" ] || echo "all|qemu-system-x86|command -v qemu-system-x86_64|$SKIP"
    # Only where one starts a Slurm to test with (docs/slurm.md).
    [ -z "${UFFDPREFETCH_SLURMBED:-}" ] || printf "all|%s|%s|$SKIP\n" slurm-wlm 'command -v slurmd' \
        munge 'command -v munged' libslurm-dev 'test -e /usr/include/slurm/spank.h'
}

missing=() costs=()
find_missing() {
    local whom name check cost
    missing=() costs=()
    while IFS='|' read -r whom name check cost; do
        if wanted "$whom" && ! bash -c "$check" >/dev/null 2>&1; then
            missing+=("$name")
            costs+=("$cost")
        fi
    done < <(packages)
}

# Names that the mirrors, when they were last asked, did not have: not asked for at every make.
unknown_stamp=build/.setup-unknown
apt() { LC_ALL=C DEBIAN_FRONTEND=noninteractive apt-get -q "$@" >>build/apt.log 2>&1; }
why=""     # why something is missing still
apt_pid="" # of what installs meanwhile
start_installing() {
    local name known=() there=() unknown
    [ "$(id -u)" = 0 ] || { why="not root"; return; }
    command -v apt-get >/dev/null || { why="no apt-get here"; return; }
    why="the mirrors do not have it"
    unknown=" $([ -n "${SETUP_FORCE:-}" ] || cat $unknown_stamp 2>/dev/null || true) "
    for name in "${missing[@]}"; do [[ "$unknown" == *" $name "* ]] || known+=("$name"); done
    [ ${#known[@]} -gt 0 ] || return 0
    say "apt-get install ${known[*]} (log: build/apt.log)"
    : >build/apt.log
    # Error-Mode: without it a mirror that does not answer is a warning.
    if ! apt update -o APT::Update::Error-Mode=any -o Acquire::Retries=1; then
        why="apt-get update failed, see build/apt.log"
        return
    fi
    # One unknown name makes apt refuse all of them.
    mapfile -t there < <(apt-cache madison "${known[@]}" 2>/dev/null | awk '{ print $1 }' | sort -u)
    for name in "${known[@]}"; do [[ " ${there[*]} " == *" $name "* ]] || unknown+="$name "; done
    printf '%s' "$unknown" >$unknown_stamp
    [ ${#there[@]} -gt 0 ] || return 0
    why="apt-get install failed, see build/apt.log"
    # What the virtual environment is made with first: it is filled while the rest comes.
    if [[ " ${there[*]} " == *" python3-venv "* ]]; then
        apt install -y --no-install-recommends python3-venv || return 0
    fi
    apt install -y --no-install-recommends "${there[@]}" &
    apt_pid=$!
}
finish_installing() {
    [ -n "$apt_pid" ] || return 0
    wait "$apt_pid" || true
    apt_pid=""
    find_missing
}
# Nobody shall find dpkg's lock held by what we have left behind.
trap finish_installing EXIT

# One line: what is missing, what is so without it, and why.
tell_missing() {
    local cost index text=""
    while read -r cost; do
        text+="${text:+; }"
        for index in "${!missing[@]}"; do
            [ "${costs[index]}" != "$cost" ] || text+="${missing[index]} "
        done
        text+="($cost)"
    done < <(printf '%s\n' "${costs[@]}" | awk '!seen[$0]++')
    say "missing: $text. All else works. Why: $why; as root, apt-get install brings these packages"
}

find_missing
[ ${#missing[@]} -eq 0 ] || start_installing

# ---- 2. the virtual environment ---------------------------------------------------------------
# /usr/bin/python3 and not the first python3 of PATH: only the distribution's interpreter sees the
# distribution's bcc.
can_venv='import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))'
# Without pip it is what an attempt left that was cut short.
if ! .venv/bin/python -c 'import pip' 2>/dev/null; then
    if /usr/bin/python3 -c "$can_venv" 2>/dev/null; then
        /usr/bin/python3 -m venv --clear --system-site-packages .venv
    elif python3 -c "$can_venv" 2>/dev/null; then
        say "/usr/bin/python3 cannot make a venv, using $(command -v python3): its venv does not see" \
            "the distribution's bcc, so the kernel witness is missing"
        python3 -m venv --clear --system-site-packages .venv
    else
        die "stopped: no Python 3.10 or newer with venv and ensurepip here (${why:-of PATH}): nothing can be" \
            "built or run without it. As root: apt-get install python3-venv python3-dev gcc libc6-dev"
    fi
fi
python=.venv/bin/python

# The requirements of a level in pyproject.toml that this environment does not meet yet. As pip sees
# it, but at once: no index is asked.
unmet() {
    "$python" - "$@" <<'PY'
import sys
from importlib import metadata
from pip._vendor.packaging.requirements import Requirement
try:
    import tomllib
except ModuleNotFoundError:
    from pip._vendor import tomli as tomllib
project = tomllib.load(open("pyproject.toml", "rb"))
extras = project["project"]["optional-dependencies"]
need = project["build-system"]["requires"] + project["project"]["dependencies"]
need += [one for extra in sys.argv[1:] for one in extras[extra]]
for text in dict.fromkeys(need):
    one = Requirement(text)
    if one.marker is None or one.marker.evaluate():
        try:
            met = one.specifier.contains(metadata.version(one.name), prereleases=True)
        except metadata.PackageNotFoundError:
            met = False
        if not met:
            print(text)
PY
}
# distribution's own packages are visible and none of our business.
pip_install() {
    "$python" -m pip --disable-pip-version-check install --no-warn-conflicts \
        --retries 1 "$@" >>build/pip.log 2>&1
}
TORCH_INDEX=https://download.pytorch.org/whl/cpu
extras_of() {
    case $1 in
    run) echo demo ;;
    test) echo demo test ;;
    all) echo demo test test-all ;;
    apps) echo demo test apps ;;
    esac
}

deps_hash=$(hash_of pyproject.toml tools/setup.sh)
if ! stamp_is ".venv/.setup-deps-$level" "$deps_hash"; then
    : >build/pip.log
    # One level after the other: what runs uffdprefetch does not wait for, or fail with, the rest.
    for one in $levels; do
        mapfile -t need < <(unmet $(extras_of "$one"))
        [ ${#need[@]} -gt 0 ] || continue
        say "pip install ${need[*]} (log: build/pip.log)"
        # PyTorch without CUDA is 2 GB less, and has an index of its own. What it needs follows below.
        for name in "${need[@]}"; do
            [[ $name != torch==* ]] || pip_install --no-deps --extra-index-url "$TORCH_INDEX" "$name" || true
        done
        # One that cannot be had or built must not cost the others.
        pip_install "${need[@]}" && continue
        finish_installing # a compiler may have been missing
        for name in "${need[@]}"; do pip_install "$name" || true; done
    done
    mapfile -t need < <(unmet $(extras_of "$level"))
    mapfile -t vital < <(unmet)
    [ ${#vital[@]} -eq 0 ] || die "stopped: pip could not install ${vital[*]} (build/pip.log), and nothing can be" \
        "built or run without them. With a network, or with their wheels in PIP_FIND_LINKS=DIRECTORY, run this again"
    [ "$level" = run ] || "$python" -c 'import pytest, xdist' 2>>build/pip.log ||
        die "stopped: pip could not install pytest and pytest-xdist (build/pip.log): no test runs without them; make" \
            "demo works. With a network, or with their wheels in PIP_FIND_LINKS=DIRECTORY, run this again"
    if [ ${#need[@]} -eq 0 ]; then
        for one in $levels; do printf '%s' "$deps_hash" >".venv/.setup-deps-$one"; done
    else
        say "missing: ${need[*]} (the tests that need them skip). All else works. Why: pip install failed, see" \
            "build/pip.log"
    fi
fi

finish_installing
if [[ " ${costs[*]} " == *"$NOTHING"* ]]; then
    die "stopped: missing ($why): ${missing[*]}; nothing can be built without them." \
        "As root: apt-get install ${missing[*]}"
fi
[ ${#missing[@]} -eq 0 ] || tell_missing

# ---- 3. the package and its C objects ---------------------------------------------------------
if [ -e tools/cffi_build.py ] && [ -e csrc/job/preload.c ] && [ -e csrc/job/agent.c ]; then
    build_stamp=.venv/.setup-build
    package_hash=$(hash_of pyproject.toml)
    build_hash=$(hash_of pyproject.toml setup.py tools/cffi_build.py $(find csrc -type f | sort))
    if ! stamp_is "$build_stamp" "$build_hash" ||
        ! .venv/bin/python -c 'import sys, importlib.util as u
sys.exit(not u.find_spec("uffdprefetch._preload"))' 2>/dev/null; then
        say "building the C objects, the package into .venv (log: build/build.log)"
        # Either builds the objects in place, anew: cffi's lists no headers. pip also makes the command,
        # which changes with pyproject.toml alone.
        if stamp_is .venv/.setup-package "$package_hash"; then
            build=("$python" setup.py build_ext --inplace --force)
        else
            build=("$python" -m pip --disable-pip-version-check install --no-deps --no-build-isolation -e .)
        fi
        if ! "${build[@]}" >build/build.log 2>&1; then
            tail -n 25 build/build.log >&2
            die "the build failed, see build/build.log"
        fi
        printf '%s' "$package_hash" >.venv/.setup-package
        printf '%s' "$build_hash" >"$build_stamp"
    fi
else
    say "csrc/ or tools/cffi_build.py is not there: the package is not built"
fi

# ---- 4. the slow storage bed ------------------------------------------------------------------
if [ -e bench/slowfs.c ] && command -v gcc >/dev/null && pkg-config --exists fuse3 2>/dev/null; then
    make -s build/slowfs || say "build/slowfs failed to build: demo uses the local disk"
fi
