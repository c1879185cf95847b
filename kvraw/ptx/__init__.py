"""The PTX that kvraw ships: CUDA C sources, the text built from them, and a manifest that says which is which."""
