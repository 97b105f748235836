"""Several machines: where they meet, that they run the same, who is there and who is missing. Imports no torch."""
