"""See a run progress: on the terminal, in experiment trackers, and before it begins how long it will take."""
