"""Where bytes live: one store per tier behind one small interface. See store.py."""
