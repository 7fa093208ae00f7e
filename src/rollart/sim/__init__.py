"""Worlds on virtual time: cost models and faults in place of devices, the same control code."""
