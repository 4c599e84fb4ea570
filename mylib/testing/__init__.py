"""Tools for testing code that places arrays."""

from ._backend import second_backend as second_backend
