# SPDX-License-Identifier: Apache-2.0
"""Numbers in the README are those of the results they name."""

import json

from benchmarks import tables


def test_the_readme_says_what_the_results_say():
  text = tables.README.read_text()
  assert text.count("<!-- table: ") == len(tables.TABLES)
  assert tables.fill(text) == text


def test_another_result_is_another_table():
  text = "a\n<!-- table: update -->\nold\n<!-- end -->\nb"
  made = tables.fill(text)
  assert made.startswith("a\n<!-- table: update -->\n\n| gradients |")
  assert made.endswith("\n\n<!-- end -->\nb")
  assert "old" not in made


def test_results_say_where_they_come_from():
  for path in sorted(tables.RESULTS.glob("*.json")):
    result = json.loads(path.read_text())
    assert "python -m benchmarks." in result["command"], path
    assert "/tmp" not in result["command"], path
    assert {"processor", "cores", "jax", "python"} <= result.keys(), path
