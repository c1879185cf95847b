"""The command line: doctor, demo, calibrate and bench."""
