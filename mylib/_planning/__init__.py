"""Chooses how a step is sharded, and compares it with one device."""
