"""Compiled programs of machines that are not here, computed in NumPy."""

from .here import run_here as run_here
