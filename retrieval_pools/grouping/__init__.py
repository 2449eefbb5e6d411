"""Ways to put entities into groups whose texts resemble each other."""
