"""Data: types, sources, scenarios, partitions, and the user's own files."""
