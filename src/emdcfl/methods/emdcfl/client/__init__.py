"""What runs where the data are: the tasks of EMD-CFL, the samples they draw, how embeddings are projected, and what is said of losses."""
