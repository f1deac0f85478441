"""Several ranks: who they are, what they exchange, what they agree on, and that none waits for ever."""
