"""What a sweep is: its space, its trials, and how they stand. Imports no torch."""
