"""`python -m pmaf`, and the `pmaf` command."""

from __future__ import annotations

import sys

from pmaf.errors import require_extra


def main() -> None:
    try:
        for module in ("typer", "rich"):
            require_extra(module, "cli")
    except ImportError as error:
        sys.exit(f"pmaf: {error}")
    from pmaf_lab.cli import app

    app(prog_name="pmaf")


if __name__ == "__main__":
    main()
