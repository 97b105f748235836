"""The process that has imported what ranks need and forks them, and the client that asks it to."""
