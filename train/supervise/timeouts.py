"""Time limits: for hangs, for ranks after a death, and for nodes that wait for each other or are gone."""

GRACE_AFTER_SIGNAL = 0.2
"""Seconds the surviving ranks get after a signal killed one of them: they can only report that it is gone."""
GRACE_AFTER_FAILURE = 3.0
"""Seconds the surviving ranks get after one has failed: they may be about to report why."""
GRACE_AFTER_EXIT = 10.0
"""Seconds the surviving ranks get after one has ended by itself, for example before it had connected to them."""
SCRIPT_PRINTS = 2.0
"""Seconds the other ranks of a script get to print their own error after one has failed."""
SCRIPT_PRINTS_FIRST = 10.0
"""The same, if the ranks that have failed only miss another one: the cause is in a rank that still runs."""
SCRIPT_GRACE = 5.0
"""Seconds between SIGTERM and SIGKILL for the other ranks of a script after one has failed."""

HANG_LEAST_MINUTES = 5.0
"""Minutes a step may always take. For longer steps HANG_TIMES_SLOWEST decides."""
HANG_TIMES_SLOWEST = 20
"""A step that takes this many times the slowest step before it is a hang."""
STOP_WAIT = 20.0
"""Seconds without a sign of life after which a task that was asked to stop is ended: its batch, or another rank, may
never come. Saving and computing metrics get `watch.start_minutes`."""
STOP_TIMES_SLOWEST = 3
"""A run with slow steps gets this many times its slowest step to stop, if that is longer than STOP_WAIT."""
MEET = 60.0
"""Seconds the ranks of a script have to meet before a warning."""
SCRIPT_HANG_MINUTES = 30.0
"""Minutes a script may give no sign of life, unless watch.hang_minutes is set."""

WAIT_MINUTES = 30.0
"""Default of --wait-minutes: minutes a node waits for the others."""
BEAT = 1.0
"""Seconds between two signs of life of a node."""
LOST = 10.0
"""Seconds without a sign of life after which a node counts as gone."""
KEEP_ALIVE = 2
"""Seconds between two of torch's own signs of life, by which its rendezvous knows the nodes of a round."""
KEEP_ALIVE_MISSED = int(LOST / KEEP_ALIVE) + 1
"""Number of these missed in a row after which torch's rendezvous drops a node. Must not be reached before LOST, or the
two would disagree."""
JOINING = KEEP_ALIVE * KEEP_ALIVE_MISSED + 3.0
"""Seconds after which a node that has not started the attempt counts as gone; torch's rendezvous drops it before."""
HUNG = 120.0
"""Seconds without a look of its supervisor after which a node gives no more signs of life: its disk may hang."""
LAST_CALL = 8
"""Seconds a round that could start with fewer nodes waits for more."""
MEETING = 30.0
"""Seconds the nodes of a round get to identify themselves."""
PROOF_OF_LIFE = 4.0
"""Seconds a node has to answer when another node claims its rank."""
CLOCK_SKEW = 5.0
"""Seconds by which clocks may differ: torch's rendezvous compares the time of day of different machines."""
SHARED_FOLDER = 10.0
"""Seconds until a shared folder must show what another machine has written."""
LINGER = 60.0
"""Seconds node 0 waits, after the end of the run, for nodes that do not know it yet."""
