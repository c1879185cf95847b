"""Measures the engines against ceilings of the same run; `kvraw bench` shows what comes out."""
