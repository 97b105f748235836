"""The ranks of a run on this machine: started, watched, and started again after a death."""
