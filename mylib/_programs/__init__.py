"""Reads compiled programs: for machines that are here, and for those that are not."""
