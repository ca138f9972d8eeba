"""Mistakes in the linear layer."""

from tests.controls.rows import Control

AXES = {"in_features": 40, "out_features": 70, "bias": 1}
CONTROLS: tuple[Control, ...] = ()
