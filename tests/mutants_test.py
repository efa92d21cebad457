# SPDX-License-Identifier: Apache-2.0
"""The list of deliberate defects still fits the source; see `mutants.py`."""

import ast
import pathlib

import mutants
import pytest

TESTS = pathlib.Path(mutants.__file__).parent
PACKAGE = mutants.ROOT / "oppo_jax"


@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda m: m.name)
def test_a_mutant_can_be_planted(mutant):
  text = (PACKAGE / mutant.file).read_text()
  assert text.count(mutant.old) == 1
  planted = text.replace(mutant.old, mutant.new)
  # Another program, not another comment; and one that can be read.
  assert ast.dump(ast.parse(planted)) != ast.dump(ast.parse(text))
  for name in mutant.tests.split():
    assert (TESTS / f"{name}_test.py").exists()


def test_mutants_are_many_and_have_names_of_their_own():
  names = [m.name for m in mutants.MUTANTS]
  assert len(set(names)) == len(names) >= 20
