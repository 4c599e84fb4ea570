"""Moves arrays, alone or together with other processes."""
