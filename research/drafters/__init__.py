"""The drafter `trained`: heads and small models."""
