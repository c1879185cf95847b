"""Reads shipped PTX, checked against the manifest."""

from __future__ import annotations

import functools
import hashlib
import json
from importlib import resources
from typing import Any

from kvraw.errors import ArtifactError

__all__ = ["manifest", "read_ptx"]

_ROOT = resources.files("kvraw.ptx")


@functools.cache
def manifest() -> dict[str, dict[str, Any]]:
    """The manifest: artifact name to sha256, target, PTX version, entries and sources.

    Raises
    ------
    ArtifactError
        It is missing or does not parse.
    """
    try:
        return dict(json.loads((_ROOT / "manifest.json").read_bytes())["artifacts"])
    except (OSError, ValueError, KeyError) as error:
        raise ArtifactError(f"kvraw/ptx/manifest.json cannot be read: {error!r}; reinstall kvraw") from error


@functools.cache
def read_ptx(name: str) -> bytes:
    """PTX text of one artifact.

    Raises
    ------
    ArtifactError
        It is not in the manifest, is missing, or differs from what the manifest says.
    """
    entry = manifest().get(name)
    if entry is None:
        raise ArtifactError(f"{name} is not in kvraw/ptx/manifest.json; there are {', '.join(manifest())}")
    try:
        text = (_ROOT / name).read_bytes()
    except OSError as error:
        raise ArtifactError(f"kvraw/ptx/{name} cannot be read: {error}; reinstall kvraw") from error
    digest = hashlib.sha256(text).hexdigest()
    if digest != entry["sha256"]:
        raise ArtifactError(
            f"kvraw/ptx/{name} has sha256 {digest}, the manifest says {entry['sha256']}; reinstall kvraw"
        )
    return text
