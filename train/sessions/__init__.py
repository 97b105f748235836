"""A session: an exact loop in a script that stays the user's. See docs/sessions.md."""
