# SPDX-License-Identifier: Apache-2.0
"""`doctor --site`: what an administrator does once on each node, as a script to read and to run."""

from __future__ import annotations

#: Everything by files of the system's own, so that it survives a reboot and can be taken back.
#: DESTDIR: of an image that is being made; then nothing is applied to the running kernel.
SCRIPT = """\
#!/bin/sh
# uffdprefetch: what an administrator does once on each node, or to its image.
#     uffdprefetch doctor --site | sudo sh -s GROUP
# GROUP: the group of those whose jobs may use it. Read this first; each part can be left out. To
# take it back, remove the three files.
set -e
group=${1:?the group of those who may use it}
etc=${DESTDIR:-}/etc
mkdir -p "$etc/udev/rules.d" "$etc/sysctl.d" "$etc/tmpfiles.d"

# 1. Who may use userfaultfd (Linux 6.1 and newer): jobs are followed closely, and the pool works.
#    The device gives no right over other processes; without it readers are followed by page tables.
echo 'KERNEL=="userfaultfd", SUBSYSTEM=="misc", GROUP="'"$group"'", MODE="0660"' \\
    > "$etc/udev/rules.d/60-uffdprefetch.rules"

# 2. Settings of the kernel. More mappings: more streams of one process are followed at once.
#    Kernels before 6.1 have no such device, but a setting that is for all users.
#    (Where there are more already, or of an image, the line is a comment.)
less='#'
if [ -z "${DESTDIR:-}" ] && [ "$(cat /proc/sys/vm/max_map_count)" -lt 262144 ]; then less=; fi
echo "${less}vm.max_map_count = 262144" > "$etc/sysctl.d/60-uffdprefetch.conf"
if [ -z "${DESTDIR:-}" ] && [ ! -e /dev/userfaultfd ]; then
    echo 'vm.unprivileged_userfaultfd = 1' >> "$etc/sysctl.d/60-uffdprefetch.conf"
fi

# 3. Huge pages for the pool, where it asks for them: fewer faults, less CPU. Not where they are
#    given already.
huge=/sys/kernel/mm/transparent_hugepage/shmem_enabled
if [ -n "${DESTDIR:-}" ] || grep -q '\\[never\\]' "$huge"; then
    echo "w $huge - - - - advise" > "$etc/tmpfiles.d/uffdprefetch.conf"
fi

if [ -z "${DESTDIR:-}" ]; then
    udevadm control --reload && udevadm trigger --name-match=userfaultfd
    sysctl -q -p "$etc/sysctl.d/60-uffdprefetch.conf"
    [ ! -e "$etc/tmpfiles.d/uffdprefetch.conf" ] ||
        systemd-tmpfiles --create "$etc/tmpfiles.d/uffdprefetch.conf"
fi
"""
#: The one cure of whatever it sets up.
COMMAND = 'uffdprefetch doctor --site | sudo sh -s "$(id -gn)"'
