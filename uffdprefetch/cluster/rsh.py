# SPDX-License-Identifier: Apache-2.0
"""What an MPI launcher takes for ssh: has a node's own convener start the node's command.

    python -m uffdprefetch.cluster.rsh DIRECTORY HOST WORD...

Leaves the command in the meeting's directory, and ends with its status when the node says that it
has ended, or when the meeting is over.
"""

from __future__ import annotations

import secrets
import sys
import time
from pathlib import Path

from uffdprefetch.base.errors import EXIT_OURS, EXIT_USAGE
from uffdprefetch.cluster.meeting import Meeting, node_of

#: Interval of looks, from the least to the most: a command may fail at once, or run as long as the
#: job.
POLL_SECONDS, POLL_MOST_SECONDS = 0.05, 1.0
#: Time limit for a node to take its command.
TAKEN_SECONDS = 5.0


def main(argv: list[str]) -> int:
    """See the module."""
    words = argv[1:]
    while words and words[0].startswith("-"):  # ssh's own: -x, -n, -q
        words.pop(0)
    if not argv or len(words) < 2:
        print("uffdprefetch rsh: DIRECTORY HOST WORD...", file=sys.stderr)
        return EXIT_USAGE
    directory, host, *command = Path(argv[0]), *words
    meeting = Meeting.at(directory)
    node = node_of(directory, host)
    if node is None:
        print(f"uffdprefetch rsh: {host} is not in {directory}", file=sys.stderr)
        return EXIT_OURS
    number = secrets.token_hex(8)
    generation = (meeting.note("generation") or {}).get("generation", 0)
    meeting.post(
        f"start-{node}-{number}",
        {"command": " ".join(command), "number": number, "generation": generation},
    )
    pause = POLL_SECONDS
    given_up = time.monotonic() + TAKEN_SECONDS
    while directory.exists():
        if time.monotonic() > given_up and meeting.take(f"start-{node}-{number}") is not None:
            print(f"uffdprefetch rsh: node {node} ({host}) does not answer", file=sys.stderr)
            return EXIT_OURS
        ended = meeting.take(f"ended-{number}")
        if ended is not None:
            return int(ended.get("status", EXIT_OURS))
        time.sleep(pause)
        pause = min(2 * pause, POLL_MOST_SECONDS)
    return EXIT_OURS


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
