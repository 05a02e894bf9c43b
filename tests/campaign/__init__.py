# SPDX-License-Identifier: Apache-2.0
"""Fault injection: the service killed, and agents made to end, at chosen and at random moments.

``make campaign`` runs the full size, tests/test_campaign.py a small one. Four ranks read one file
without pause, through dense checkpoints that slide, and through second mappings that are given back
in part. A trial then takes the service away with SIGKILL, or each agent ends at a step of its own.
Every rank goes on for some passes, and every SHA-256 over all bytes that it ever took must be that
of the file.

*What a kill hits* is not guessed. Each agent writes in its event ring what it is about to do and
when its last fault came. The campaign reads that from the rank's own memory (/proc/PID/mem). When
the state is the one wanted it stops the rank, looks again, and kills the service only if the agent
stands still in that state; so the service dies while the agent is there. Kills of the kind
``moment`` stop nobody: they come at a random time. A kill counts only if some rank took a fault in
the 10 ms before.
"""
