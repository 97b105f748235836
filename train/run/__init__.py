"""A run: its folder, its record, and the files written while it trains. Imports no torch."""
