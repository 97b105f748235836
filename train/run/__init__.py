"""A run: its folder, its record, and what is written into it while it trains. Imports no torch."""
