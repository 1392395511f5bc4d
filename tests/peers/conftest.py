"""The tests of this folder run in ./dev test --peers only: they need packages that .venv does not have."""

import importlib.util
import sys
from pathlib import Path

NEEDED = ("compressed_tensors", "gguf", "modelopt", "torchao", "transformers")
collect_ignore_glob = [] if all(importlib.util.find_spec(name) for name in NEEDED) else ["test_*.py"]
sys.path.insert(0, str(Path(__file__).parent))
