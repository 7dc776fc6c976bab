"""Faults for ``benchmarks/reliability.py``: kills, signals, full disks, damaged files, bad inputs, and what must come out all the same."""
