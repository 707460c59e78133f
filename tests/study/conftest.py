"""Makes the study and the demo's world importable, as `python -m benchmarks.study` does."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples" / "demo")]
