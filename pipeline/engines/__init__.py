"""What a worker writes texts with: our engine, or one that a team runs already."""
