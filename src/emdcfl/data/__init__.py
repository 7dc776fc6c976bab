"""Data: types, sources, scenarios, partitions, and people's own files."""
