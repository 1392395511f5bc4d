"""docs/invariance.md has the tables that tests hold."""

import re

from every_invariance import tables

TABLES = re.compile(r"(<!-- begin of tables -->\n\n)(.*?)(<!-- end of tables -->)", re.DOTALL)


def test_the_tables_are_those_of_the_tests(page):
    found = TABLES.search(page("docs/invariance.md").text)
    assert found and found[2] == tables()
