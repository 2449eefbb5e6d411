"""Rules by which drafted tokens are accepted, one file a rule."""
