"""What training and testing compute: losses, terms that methods add to them, scores of unbalanced classes, profiles of data."""
