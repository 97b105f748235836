"""From a request to a run that lives by itself: checks, tmux, the agent, the keeper, a stop."""
