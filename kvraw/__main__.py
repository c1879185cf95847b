"""``python -m kvraw``: the command line."""

from kvraw.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
