"""Copies: plans, what carries them out, and the choice among it."""
