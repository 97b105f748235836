"""Several machines: they meet, compare themselves, and start and end each attempt together."""
