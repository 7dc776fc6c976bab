"""Sites that took no part in training: which group they belong to, with labels or without, and how well its model serves them."""
