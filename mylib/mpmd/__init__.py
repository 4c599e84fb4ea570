"""Meshes that share no devices: pipelines over several, and their schedules."""

from ._actions import Action as Action, Pass as Pass
from ._pipeline import pipeline as pipeline
from ._schedule import Schedule as Schedule
from ._schedules import (
    gpipe as gpipe,
    interleaved as interleaved,
    one_f_one_b as one_f_one_b,
    zero_bubble as zero_bubble,
)

__all__ = [
    "Action",
    "Pass",
    "Schedule",
    "gpipe",
    "interleaved",
    "one_f_one_b",
    "pipeline",
    "zero_bubble",
]
