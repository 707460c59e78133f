"""`motley crds [--check] FOLDER ...`: writes the CustomResourceDefinitions, or says which are out of date."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from motley_api import crd


def main() -> None:
    parser = argparse.ArgumentParser(prog="motley crds", description=crd.__doc__)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a file is out of date")
    options = parser.parse_args()
    if not options.check:
        for path in crd.write(*options.folders):
            print(f"wrote {path}")
        return
    stale = [
        folder / name
        for folder in options.folders
        for name, text in crd.render().items()
        if not (folder / name).exists() or (folder / name).read_text() != text
    ]
    for path in stale:
        print(f"{path} is out of date: run `make crds`", file=sys.stderr)
    sys.exit(1 if stale else 0)


if __name__ == "__main__":
    main()
