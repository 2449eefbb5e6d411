"""The engines with which a worker writes texts: our own, or one that a team runs already."""
