"""Makes the scripts beside the demo importable, as they are when run from their own folder."""

import sys
from pathlib import Path

DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo"
sys.path.insert(0, str(DEMO))
