"""Whatever would give other results is seen here, and refused or allowed for."""
