# SPDX-License-Identifier: Apache-2.0
"""The signals of what the suite starts, however the suite was started itself."""

from __future__ import annotations

import contextlib
import os
import signal

_STOPS = {signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU}
#: The interpreter ignores these itself, and subprocess restores them for what it starts.
_PYTHONS = {signal.SIGPIPE, signal.SIGXFSZ}


def usual_signals() -> None:
    """Give what we start the signal dispositions of a program that a user starts at a prompt.

    A script's background job inherits an ignored SIGINT and SIGQUIT, nohup's an ignored SIGHUP, and
    both hand them on to all that they start. A handler becomes the default at exec; one that does
    nothing leaves ours as good as ignored. Then Ctrl-C at that terminal must not reach what we
    start either: a process group of our own.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    ignored = {
        number
        for number in signal.valid_signals() - _PYTHONS
        if signal.getsignal(number) == signal.SIG_IGN
    }
    for number in ignored:
        # a stop signal with a handler would have every write to the terminal try again for ever
        default = number in _STOPS or number == signal.SIGCHLD
        signal.signal(number, signal.SIG_DFL if default else lambda *_: None)
    if signal.SIGINT in ignored:
        with contextlib.suppress(PermissionError):  # a session's leader has one
            os.setpgid(0, 0)
