"""What is asked of the model and what is kept of its answer."""
