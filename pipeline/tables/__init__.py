"""The input tables users, items and interactions: their schema, reading, checking, importing and sampling."""
