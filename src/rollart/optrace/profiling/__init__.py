"""Measuring a device: its operators, its collectives, both at once, and the host. Imports torch; import it inside
functions.
"""
