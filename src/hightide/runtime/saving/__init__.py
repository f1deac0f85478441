"""Values of a run at the end of a step, read while training goes on."""
