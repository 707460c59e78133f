"""`motley crds [--check] [--reference FILE] FOLDER ...`: writes CRDs and reference, or says which are out of date."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from motley_api import crd, reference


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="motley crds", description="Write the CustomResourceDefinitions into each FOLDER."
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    parser.add_argument(
        "--reference", type=Path, metavar="FILE", help="also write the resources' reference as Markdown"
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a file is out of date")
    options = parser.parse_args()
    wanted = {folder / name: text for folder in options.folders for name, text in crd.render().items()}
    if options.reference:
        wanted[options.reference] = reference.render()
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text() != text]
    for path in stale:
        if options.check:
            print(f"{path} is out of date: run `make crds`", file=sys.stderr)
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(wanted[path])
        print(f"wrote {path}")
    sys.exit(1 if options.check and stale else 0)


if __name__ == "__main__":
    main()
