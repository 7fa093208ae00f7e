"""Runs that can be named: one function per run, each returning a typed configuration, and presets to lay over them."""
