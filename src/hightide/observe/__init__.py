"""The first steps against the forecast, recordings, stats."""
