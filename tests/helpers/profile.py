"""How many examples a property gets: ten times as many with ``KVRAW_TEST_PROFILE=thorough``, as CI runs them."""

from __future__ import annotations

import os

THOROUGH = os.environ.get("KVRAW_TEST_PROFILE", "quick") == "thorough"


def examples(count: int) -> int:
    """So many, or ten times as many."""
    return 10 * count if THOROUGH else count
