"""Adaptors, which bring texts into a CTR network: one file for each framework that published one."""
