"""Measurements that a user can repeat: ratios in one process beside the alternative, on this machine."""
