"""What runs where the data are: the tasks of EMD-CFL, which samples they draw, and how embeddings are projected before they leave."""
