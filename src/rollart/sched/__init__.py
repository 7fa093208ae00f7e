"""Decisions: pure and synchronous, facts in, actions out. No clock, task, client, log or random source of their own."""
