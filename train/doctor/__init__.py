"""Checks of the machine: what was seen, whether it is well, and the command that mends it.

Standard library alone, from Python 3.8 on, so that a host is checked before anything is installed there; only
doctor/job.py, which speaks to other ranks, imports torch. One file a subject, each a list of checks.
"""
