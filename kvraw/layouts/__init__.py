"""Readings of tensors: which axis of a tensor is which axis of a paged cache."""
