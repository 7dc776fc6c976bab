"""Look for mistakes in data: what is doubtful, where splits share samples, what repairs it, and the page that says so."""
