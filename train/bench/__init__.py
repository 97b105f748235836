"""Measurements that a user can repeat: this package beside its alternative, on this machine."""
