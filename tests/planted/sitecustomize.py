"""Python imports this when it starts, where PYTHONPATH names this folder: so every process of a test has the bug."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from planted.plant import plant_at_import  # noqa: E402

plant_at_import()
