"""Measurements that developers repeat, each with its own program: `python -m benchmarks.start --times 5`.

What users measure on their machines is in train/bench (`train bench`). README.md has the results.
"""
