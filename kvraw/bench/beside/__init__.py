"""Transfers beside a decode loop: what they reach, and what each step of it takes longer. Needs torch."""
