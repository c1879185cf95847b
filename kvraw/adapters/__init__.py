"""Other projects' signatures, translated to plans."""
