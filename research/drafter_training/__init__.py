"""Trains drafters on texts that their target wrote."""
