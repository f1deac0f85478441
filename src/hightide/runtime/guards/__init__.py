"""Causes of other results are seen here, and refused or allowed for."""
