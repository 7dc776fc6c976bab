"""What a run's numbers say: intervals of accuracies, baselines beside the run, and what to do."""
