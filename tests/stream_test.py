# SPDX-License-Identifier: Apache-2.0
"""Claims about the stream of prompts."""

import dataclasses

import numpy as np
import pytest

from oppo_jax import stream, tokenizer
from oppo_jax.tasks import base


@dataclasses.dataclass(frozen=True)
class Letters:
  """A -> 1, B -> 2, ...; BOS is 0 or missing."""

  bos_id: int | None = 0

  def encode_prompt(self, text):
    bos = [] if self.bos_id is None else [self.bos_id]
    return bos + [ord(c) - ord("A") + 1 for c in text]


def examples(*prompts):
  return [base.Example(p, "", "") for p in prompts]


def encode(*prompts, tok=Letters(), max_prompt_len=4, long_prompts="refuse"):
  return stream.encode_prompts(
    examples(*prompts),
    tok,
    max_prompt_len=max_prompt_len,
    long_prompts=long_prompts,
  )


def test_every_epoch_is_another_permutation():
  s = stream.Stream(num_examples=7, seed=3, group_size=1)
  epochs = [[s.index(7 * e + k) for k in range(7)] for e in range(5)]
  assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
  assert len({tuple(epoch) for epoch in epochs}) == 5


def test_an_epoch_is_the_permutation_of_seed_and_epoch():
  s = stream.Stream(num_examples=5, seed=3, group_size=1)
  expected = np.random.default_rng([3, 2]).permutation(5)
  assert [s.index(10 + k) for k in range(5)] == expected.tolist()


def test_a_uid_has_one_prompt_in_whatever_order_it_is_asked_for():
  s = stream.Stream(num_examples=5, seed=0, group_size=2)
  uids = list(range(200))
  forward = {u: s.index(u) for u in uids}
  rng = np.random.default_rng(0)
  for u in rng.permutation(uids):  # Jumps over more epochs than are cached.
    assert stream.Stream(5, 0, 2).index(u) == forward[int(u)]


def test_a_group_shares_its_prompt():
  s = stream.Stream(num_examples=4, seed=1, group_size=3)
  found = [s.index(u) for u in range(12)]
  assert found[0::3] == found[1::3] == found[2::3]
  assert sorted(found[0::3]) == [0, 1, 2, 3]


def test_another_seed_is_another_order():
  one, two = (stream.Stream(50, seed, 1) for seed in (0, 1))
  assert [one.index(u) for u in range(50)] != [two.index(u) for u in range(50)]


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (dict(num_examples=0), "num_examples=0"),
    (dict(seed=-1), "seed=-1"),
    (dict(group_size=0), "group_size=0"),
  ],
)
def test_a_bad_stream_is_named(change, message):
  with pytest.raises(ValueError, match=message):
    stream.Stream(**(dict(num_examples=1, seed=0, group_size=1) | change))


def test_prompts_start_with_bos():
  prompts = encode("AB", "", "ABC")
  assert [p.tolist() for p in prompts.tokens] == [[0, 1, 2], [0], [0, 1, 2, 3]]
  assert prompts.tokens[0].dtype == np.int32
  assert prompts.rows.tolist() == [0, 1, 2]
  assert prompts.num_long == 0


def test_without_a_bos_the_whole_room_is_the_prompts():
  prompts = encode("ABCD", tok=Letters(bos_id=None))
  assert prompts.tokens[0].tolist() == [1, 2, 3, 4]
  with pytest.raises(ValueError, match="row 1 is empty"):
    encode("A", "", tok=Letters(bos_id=None))


def test_a_long_prompt_is_refused_by_row_length_and_limit():
  with pytest.raises(ValueError, match="row 1 has 5 tokens.* is 4"):
    encode("ABC", "ABCD")


def test_long_prompts_are_skipped_and_counted():
  prompts = encode("ABCD", "A", "ABCDE", "B", long_prompts="skip")
  assert [p.tolist() for p in prompts.tokens] == [[0, 1], [0, 2]]
  assert prompts.rows.tolist() == [1, 3]
  assert prompts.num_long == 2
  with pytest.raises(ValueError, match="no prompt fits.*=4.*2 do not"):
    encode("ABCD", "ABCDE", long_prompts="skip")


def test_long_prompts_keep_bos_and_their_end():
  prompts = encode("ABCDE", "A", long_prompts="truncate_left")
  assert [p.tolist() for p in prompts.tokens] == [[0, 3, 4, 5], [0, 1]]
  assert prompts.rows.tolist() == [0, 1]
  assert prompts.num_long == 1


@pytest.mark.parametrize(
  ("kwargs", "message"),
  [
    (dict(long_prompts="cut"), "long_prompts='cut'.*truncate_left"),
    (dict(max_prompt_len=1), "max_prompt_len=1"),
  ],
)
def test_a_bad_limit_is_named(kwargs, message):
  with pytest.raises(ValueError, match=message):
    encode("A", **kwargs)


def test_a_real_tokenizer_fits():
  tok = tokenizer.make("char", corpus=["12+="])
  prompts = encode("1+2=", tok=tok, max_prompt_len=5)
  assert prompts.tokens[0].tolist() == [tok.bos_id, *tok.encode("1+2=")]


def test_target_lengths_are_read_line_by_line(tmp_path):
  path = tmp_path / "lengths.txt"
  path.write_text("3\n1\n 16 \n")
  found = stream.load_target_lengths(path, max_response_len=16)
  assert found.tolist() == [3, 1, 16]
  assert found.dtype == np.int32


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("3\n17\n", r"lengths.txt, line 2: target length 17 .*\[1, 16\]"),
    ("0\n", "lengths.txt, line 1: target length 0"),
    ("3\n-1\n", "lengths.txt, line 2: target length -1"),
    ("3\n\n4\n", "lengths.txt, line 2: '' is no integer"),
    ("3\n4.0\n", "lengths.txt, line 2: '4.0' is no integer"),
    ("uid,length\n", "lengths.txt, line 1: 'uid,length' is no integer"),
    (b"\xff\xfe\n", "lengths.txt, line 1: .* is no integer"),
    ("", "lengths.txt: no target lengths"),
  ],
)
def test_a_bad_target_length_is_named(tmp_path, text, message):
  path = tmp_path / "lengths.txt"
  path.write_bytes(text if isinstance(text, bytes) else text.encode())
  with pytest.raises(ValueError, match=message):
    stream.load_target_lengths(path, max_response_len=16)
