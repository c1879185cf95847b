"""Other projects' signatures, translated to layouts, plans and pools: the only place that knows their names."""
