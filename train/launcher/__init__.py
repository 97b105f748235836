"""From a request to a running run: checks, tmux, the agent, the keeper, a stop."""
