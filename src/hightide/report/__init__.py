"""Pages and tables of simulated or measured steps."""
