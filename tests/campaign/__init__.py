# SPDX-License-Identifier: Apache-2.0
"""Fault injection: the service killed, and agents made to end, at chosen and at random moments.

``make campaign`` runs the full size, tests/faults/test_campaign.py a small one. Four ranks read one
file without pause, through dense checkpoints, and through second mappings that are given back in
part. A trial then takes the service away with SIGKILL, or each agent ends at a step of its own.
Every rank goes on for some passes, and every SHA-256 over all bytes that it ever took must be that
of the file.

*What a kill hits* is not guessed. The agent of one rank stands still (SIGSTOP) at a random step of
the state that is wanted, the service is killed, and then that rank goes on; so the service dies
while an agent is just there, and the other three ranks read on. Kills of the kind ``moment`` stop
nobody: they come at a random time, and the state is what the event rings show. When the last fault
came is in the rings, too; the campaign reads them from the ranks' own memory (/proc/PID/mem). A
kill counts only if some rank took a fault in the 10 ms before.

With ``--engine pool`` the ranks read through a pool of a quarter of the file, so that blocks leave
and are read again all the time. Agents have fewer states there: they attach, lay the pool's memory
in a mapping's place (three steps), arm a page behind the reader and give the mapping back (two);
faults are the service's.

With ``cache-plan`` and ``pool-plan`` each rank reads in a shuffled order of its own, which a plan
file tells (--plan): the service warms and evicts by that. The second mapping
is read beside it, in no known order.
"""
