"""The command line: doctor and demo."""
