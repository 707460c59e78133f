"""Decisions as values: what a run's fleet should be, from what was seen and the time. No I/O, no clock, no framework."""
