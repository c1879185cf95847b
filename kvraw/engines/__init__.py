"""Engines: each carries out the same copy plans, byte for byte alike."""
