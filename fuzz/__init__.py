"""Coverage-guided fuzzing (atheris) of what reads bytes from elsewhere. ``make fuzz`` runs it; see ``docs/guide/reliability.md``."""
