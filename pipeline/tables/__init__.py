"""The input schema: users, items, interactions; reading, checking, importing, and the sample world."""
