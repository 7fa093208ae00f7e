"""The command line: reads arguments, calls the work, turns errors into one message and an exit code."""
