"""Types, lifecycles, events, errors: standard library only, below everything."""
