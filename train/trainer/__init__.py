"""What every rank does: load the state, train step by step, evaluate, log, finish."""
