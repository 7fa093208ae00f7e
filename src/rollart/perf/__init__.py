"""Cost models: numbers in, seconds out. Pure: no clock, no files but the package's own tables, nothing above core."""
