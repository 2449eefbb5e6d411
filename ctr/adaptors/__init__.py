"""Ways of using texts in a CTR network, a file each, by the framework that published it."""
