"""Clustered federated learning that finds the groups by itself."""

__version__ = "0.1.0"
