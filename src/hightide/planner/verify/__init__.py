"""A schedule is replayed before it runs, a plan is checked before it is used."""
