"""Ways to draft, one file a method."""
