"""The interpreter of schedules, and the work of each action."""
