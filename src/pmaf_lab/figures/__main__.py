"""Fill the pages with the numbers of docs/figures.json.

python -m pmaf_lab.figures [--check] [ROOT]
"""

import argparse
import sys
from pathlib import Path

from pmaf_lab.figures.pages import fill
from pmaf_lab.figures.record import FigureError, Record


def main() -> int:
    parser = argparse.ArgumentParser("python -m pmaf_lab.figures", description=__doc__)
    parser.add_argument("root", nargs="?", type=Path, default=Path(), metavar="ROOT")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if pages differ")
    options = parser.parse_args()
    try:
        record = Record.read(options.root / "docs" / "figures.json")
        changed = fill(options.root, record, write=not options.check)
    except (FigureError, OSError) as error:
        print(f"pmaf: {error}", file=sys.stderr)
        return 2
    for page in changed:
        print(f"{page} {'differs' if options.check else 'filled'}")
    return int(options.check and bool(changed))


if __name__ == "__main__":
    sys.exit(main())
