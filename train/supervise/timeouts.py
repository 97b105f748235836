"""When ranks hang, how long they live on when one is dead, how long nodes wait for each other, and when one is gone.

In seconds, but for those called minutes, and one factor.
"""

GRACE_AFTER_SIGNAL = 0.2
"""For its peers where a signal has ended a rank: all that they could say is that it is gone."""
GRACE_AFTER_FAILURE = 3.0
"""The same where it has failed: they may be about to say why."""
GRACE_AFTER_EXIT = 10.0
"""The same where it has ended by itself, for example before it had met the others, who still wait for it."""
SCRIPT_GRACE = 5.0
"""Between SIGTERM and SIGKILL for the peers of a script's rank that has failed."""

HANG_LEAST_MINUTES = 5.0
"""A step may always take so long. Beyond it, a run's own experience decides."""
HANG_TIMES_SLOWEST = 20
"""A step that takes so many times the slowest one before it is a hang."""
STOP_WAIT = 20.0
"""Seconds without a sign of life after which a task that was asked to stop is ended: its batch, or a peer, may never
come. Saving and computing metrics have `watch.start_minutes`."""
STOP_TIMES_SLOWEST = 3
"""A run with slow steps gets so many times its slowest step so far to stop, if that is longer than STOP_WAIT."""
SCRIPT_HANG_MINUTES = 30.0
"""How long a script may show no sign of life, unless watch.hang_minutes says otherwise."""

WAIT_MINUTES = 30.0
"""Default of --wait-minutes: how long a node waits for the others."""
BEAT = 1.0
"""Between two signs of life."""
LOST = 10.0
"""Without a sign of life a node is gone."""
KEEP_ALIVE = 2
"""Between two of torch's own signs of life, by which its rendezvous knows who is in a round."""
KEEP_ALIVE_MISSED = int(LOST / KEEP_ALIVE) + 1
"""Of those in a row, after which its rendezvous drops a node: not before LOST, or both would disagree."""
JOINING = KEEP_ALIVE * KEEP_ALIVE_MISSED + 3.0
"""A node that has not begun the attempt with the others is gone: torch's rendezvous must have had time to drop it."""
HUNG = 120.0
"""Without a look of its supervisor a node gives no more signs of life: its disk hangs, maybe."""
LAST_CALL = 8
"""A round which could begin with fewer nodes waits for more."""
MEETING = 30.0
"""The nodes of a round have to say who they are."""
PROOF_OF_LIFE = 4.0
"""In which a node whose rank another one wants shows that it lives."""
CLOCK_SKEW = 5.0
"""By which clocks may differ: torch's rendezvous compares the times of day of different machines."""
SHARED_FOLDER = 10.0
"""In which a folder that machines share shows what another one has written."""
LINGER = 60.0
"""For which node 0, when its run has ended, waits for a node that does not know it yet."""
