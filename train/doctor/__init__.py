"""Checks of the machine: what was seen, the verdict, and the command that fixes a problem.

Uses only the standard library of Python 3.8, so that a host can be checked before anything is installed. Only
doctor/job.py, which checks several ranks, imports torch. Each file has the checks of one subject.
"""
