#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# The wheel for aarch64, made by a cross-compiler from an unpacked source tree, and the interpreter of
# that architecture to try it with under qemu-user (which has no userfaultfd: no job is served there).
#     tools/wheel_aarch64.sh TREE OUT      the wheel comes into OUT, the interpreter to build/aarch64/python
# Wants apt-get (Debian or one like it), aarch64-linux-gnu-gcc, qemu-aarch64-static; no root.
set -eu
tree=$1 out=$2
root=$(cd "$(dirname "$0")/.." && pwd)
work=$root/build/aarch64
python=${PYTHON:-$root/.venv/bin/python}

# Debian's own packages of the other architecture, unpacked; nothing of this machine's is touched.
if [ ! -x "$work/python" ]; then
    rm -rf "$work"
    mkdir -p "$work/lists/partial" "$work/cache/archives/partial" "$work/debs" "$work/root"
    : > "$work/status"
    apt() {
        apt-get -qq -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o Dir::State="$work" \
            -o Dir::State::status="$work/status" -o Dir::Cache="$work/cache" \
            -o APT::Sandbox::User="$(id -un)" "$@"
    }
    apt update
    version=$(apt-cache -o APT::Architecture=arm64 -o Dir::State="$work" -o Dir::State::status="$work/status" \
        -o Dir::Cache="$work/cache" show python3 | sed -n 's/^Depends:.* python3\.\([0-9]*\).*/\1/p' | head -n 1)
    name=python3.$version
    (cd "$work/debs" && apt download "$name-minimal" "lib$name-minimal" "lib$name-stdlib" "lib$name-dev" \
        libc6 libexpat1 zlib1g libffi8 libgcc-s1 libstdc++6 libssl3 libuuid1 liblzma5 libbz2-1.0)
    for deb in "$work"/debs/*.deb; do dpkg-deb -x "$deb" "$work/root"; done
    cat > "$work/python.$$" <<EOF
#!/bin/sh
exec qemu-aarch64-static -L "$work/root" "$work/root/usr/bin/$name" "\$@"
EOF
    chmod +x "$work/python.$$"
    mv "$work/python.$$" "$work/python"
fi

include=$(echo "$work"/root/usr/include/python3.*)
cd "$tree"
rm -rf build uffdprefetch/*.so uffdprefetch/_replay
_PYTHON_HOST_PLATFORM=linux-aarch64 CC=aarch64-linux-gnu-gcc LDSHARED="aarch64-linux-gnu-gcc -shared" \
    CFLAGS="-isystem $work/root/usr/include" CPPFLAGS="-I$include" \
    "$python" setup.py -q bdist_wheel --plat-name linux_aarch64 --dist-dir "$out" > build.log 2>&1 ||
    { tail -n 20 build.log >&2; exit 1; }
