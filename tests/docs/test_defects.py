"""docs/defects-we-do-not-have.md names tests that exist."""

import re


def test_every_named_test_exists(root):
    defined = {
        name for path in (root / "tests").rglob("test_*.py") for name in re.findall(r"def (test_\w+)", path.read_text())
    }
    named = set(re.findall(r"`(test_\w+)`", (root / "docs/defects-we-do-not-have.md").read_text()))
    assert len(named) > 40 and not named - defined
