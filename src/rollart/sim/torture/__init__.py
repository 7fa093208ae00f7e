"""The torture machine: whole runs of the control code under random faults, each checked against every promise."""
