#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Runs a command under the seccomp filter that a container of no capabilities gets.

    with_seccomp.py PROFILE.json CMD...

PROFILE: as Docker and Podman read it (OCI's linux.seccomp). By the distribution's Python, which
has libseccomp's bindings.
"""

import json
import os
import sys

import seccomp

COMPARE = {
    "SCMP_CMP_EQ": seccomp.EQ, "SCMP_CMP_NE": seccomp.NE, "SCMP_CMP_LT": seccomp.LT,
    "SCMP_CMP_LE": seccomp.LE, "SCMP_CMP_GE": seccomp.GE, "SCMP_CMP_GT": seccomp.GT,
    "SCMP_CMP_MASKED_EQ": seccomp.MASKED_EQ,
}  # fmt: skip
EPERM = 1


def action(name, errno):
    """One of libseccomp's."""
    return seccomp.ALLOW if name == "SCMP_ACT_ALLOW" else seccomp.ERRNO(errno or EPERM)


def applies(rule):
    """To a container without capabilities on this machine (x86_64)."""
    wanted, unwanted = rule.get("includes") or {}, rule.get("excludes") or {}
    arches = wanted.get("arches")
    return not (
        wanted.get("caps")
        or (arches and "amd64" not in arches)
        or "amd64" in (unwanted.get("arches") or [])
    )


def conditions(rule):
    """Of the call's arguments."""
    made = []
    for one in rule.get("args") or []:
        values = [one["value"]]
        if one["op"] == "SCMP_CMP_MASKED_EQ":
            values.append(one.get("valueTwo", 0))
        made.append(seccomp.Arg(one["index"], COMPARE[one["op"]], *values))
    return made


def main():
    """See the module."""
    with open(sys.argv[1]) as file:
        profile = json.load(file)
    default = profile["defaultAction"], profile.get("defaultErrnoRet") or EPERM
    rules = seccomp.SyscallFilter(action(*default))
    for rule in filter(applies, profile["syscalls"]):
        if (rule["action"], rule.get("errnoRet") or EPERM) == default:
            continue
        for name in rule["names"]:
            try:
                rules.add_rule(
                    action(rule["action"], rule.get("errnoRet")), name, *conditions(rule)
                )
            except RuntimeError:
                pass  # a call that this libseccomp, or this machine, does not have
    rules.load()
    os.execvp(sys.argv[2], sys.argv[2:])


main()
