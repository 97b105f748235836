"""Imported first by the server that forks ranks: a signal to the whole process group must not end it, and them with it.

Ranks begin with these signals ignored, until they listen for them.
"""

import signal

from train.signals import POLITE

for number in (*POLITE, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
