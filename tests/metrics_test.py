# SPDX-License-Identifier: Apache-2.0
"""The way to the host, clocks, writers and hashes."""

import json
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from oppo_jax import metrics


def test_fetch_is_one_counted_sync_for_a_whole_tree():
  before = metrics.SYNCS.count
  tree = {"a": jnp.arange(3), "b": (jnp.float32(2.5), None)}
  with jax.transfer_guard_device_to_host("disallow"):
    got = metrics.fetch(tree)
  assert metrics.SYNCS.count == before + 1
  assert type(got["a"]) is np.ndarray
  np.testing.assert_array_equal(got["a"], [0, 1, 2])
  assert got["b"] == (2.5, None)


def test_what_was_fetched_outlives_the_donated_buffer():
  add = jax.jit(lambda x: x + 1, donate_argnums=0)
  x = add(jnp.zeros(1000))
  seen = metrics.fetch(x)
  jax.block_until_ready(add(add(x)))
  np.testing.assert_array_equal(seen, np.ones(1000, np.float32))


def test_timers_add_up_by_phase_and_start_anew():
  timers = metrics.Timers()
  with timers("step"):
    for _ in range(2):
      with timers("decode"):
        time.sleep(0.02)
  row = timers.take()
  assert 0.04 <= row["time/decode_s"] <= row["time/step_s"]
  assert row["time/decode_wait_s"] == 0.0
  assert timers.take() == {}


def test_waiting_is_charged_to_the_phases_around_the_fetch(monkeypatch):
  def slow(tree):
    time.sleep(0.02)
    return tree

  monkeypatch.setattr(jax, "device_get", slow)
  timers = metrics.Timers()
  with timers("step"):
    with timers("decode"):
      metrics.fetch(1)
    with timers("score"):
      time.sleep(0.02)
  row = timers.take()
  assert row["time/decode_wait_s"] >= 0.02
  assert row["time/step_wait_s"] == row["time/decode_wait_s"]
  assert row["time/score_wait_s"] == 0.0
  assert row["time/score_s"] >= 0.02


def test_a_phase_that_raises_is_still_timed():
  timers = metrics.Timers()
  with pytest.raises(KeyError), timers("update"):
    raise KeyError
  assert "time/update_s" in timers.take()


def test_rows_are_on_disk_as_soon_as_they_are_written(tmp_path):
  path = tmp_path / "metrics.jsonl"
  writer = metrics.JsonlWriter(path)
  for step in range(3):
    writer.write({"step": step, "x": np.float32(0.5), "n": np.int64(7)})
    assert len(metrics.read_jsonl(path)) == step + 1
  writer.close()
  assert metrics.read_jsonl(path)[2] == {"step": 2, "x": 0.5, "n": 7}


def test_nan_and_infinities_are_written_as_null(tmp_path):
  row = {
    "step": 0,
    "nan": float("nan"),
    "inf": np.float32("inf"),
    "array": np.array([1.0, -np.inf]),
    "nested": {"x": [np.bool_(True), np.nan]},
  }
  writer = metrics.JsonlWriter(tmp_path / "rows.jsonl")
  writer.write(row)
  metrics.write_json(tmp_path / "row.json", row)
  writer.close()
  expected = {
    "step": 0,
    "nan": None,
    "inf": None,
    "array": [1.0, None],
    "nested": {"x": [True, None]},
  }
  assert metrics.read_jsonl(tmp_path / "rows.jsonl") == [expected]
  assert json.loads((tmp_path / "row.json").read_text()) == expected


def test_a_device_array_is_refused_not_waited_for(tmp_path):
  writer = metrics.JsonlWriter(tmp_path / "rows.jsonl")
  with pytest.raises(TypeError, match="fetch"):
    writer.write({"step": 0, "loss": jnp.float32(1)})
  writer.close()
  assert metrics.read_jsonl(tmp_path / "rows.jsonl") == []


def test_a_resumed_run_writes_its_steps_over_those_of_the_killed_one(tmp_path):
  path = tmp_path / "metrics.jsonl"
  writer = metrics.JsonlWriter(path)
  for step in range(4):
    writer.write({"step": step, "run": "killed"})
  writer.close()
  with path.open("a") as f:
    f.write('{"step": 4, "ru')  # killed while writing
  assert [r["step"] for r in metrics.read_jsonl(path)] == [0, 1, 2, 3]

  writer = metrics.JsonlWriter(path, resume_at=2)
  writer.write({"step": 2, "run": "resumed"})
  writer.close()
  rows = metrics.read_jsonl(path)
  assert [r["step"] for r in rows] == [0, 1, 2]
  assert [r["run"] for r in rows] == ["killed", "killed", "resumed"]


def test_appending_after_half_a_line_keeps_the_file_readable(tmp_path):
  path = tmp_path / "metrics.jsonl"
  path.write_text('{"step": 0}\n{"step": 1, "x"')
  writer = metrics.JsonlWriter(path)
  writer.write({"step": 1})
  writer.close()
  assert metrics.read_jsonl(path) == [{"step": 0}, {"step": 1}]


def test_a_line_that_is_not_json_is_named(tmp_path):
  path = tmp_path / "metrics.jsonl"
  path.write_text('{"step": 0}\nnonsense\n{"step": 2}\n')
  with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2"):
    metrics.read_jsonl(path)


def test_write_json_leaves_the_file_as_it_was_if_it_fails(
  tmp_path, monkeypatch
):
  path = tmp_path / "state.json"
  metrics.write_json(path, {"step": 1})

  def killed(*_):
    raise OSError("killed before the data was safe")

  with monkeypatch.context() as m:
    m.setattr(metrics.os, "fsync", killed)
    with pytest.raises(OSError, match="killed"):
      metrics.write_json(path, {"step": 2})
  assert json.loads(path.read_text()) == {"step": 1}
  metrics.write_json(path, {"step": 3})
  assert json.loads(path.read_text()) == {"step": 3}
  assert [p.name for p in tmp_path.iterdir()] == ["state.json"]


def test_the_console_line_shows_a_step_and_a_dash_for_what_is_missing(capsys):
  writer = metrics.ConsoleLine()
  writer.write(
    {
      "step": 3,
      "objective/scores": 0.51234,
      "objective/kl": np.float32(0.02),
      "overlap/delta": 4,
      "overlap/chunk_size": np.int64(64),
      "overlap/deferred": 3,
      "time/step_s": 1.234,
    }
  )
  writer.close()
  words = capsys.readouterr().out.split()
  pairs = dict(zip(words[::2], words[1::2]))
  assert pairs == {
    "step": "3",
    "score": "0.512",
    "kl": "0.0200",
    "delta": "4",
    "chunk": "64",
    "deferred": "3",
    "ticks": "-",
    "seconds": "1.23",
  }


def test_tensorboard_gets_every_number_of_a_row(tmp_path):
  pytest.importorskip("tensorboardX", reason="an optional extra")
  from tensorboardX.proto import event_pb2

  writer = metrics.TensorBoardWriter(tmp_path)
  writer.write({"step": 7, "objective/kl": np.float32(0.5), "arm": "oppo"})
  writer.write({"step": 8, "overlap/delta": 4})
  writer.close()
  (file,) = tmp_path.iterdir()
  data, seen = file.read_bytes(), []
  while data:  # TFRecord: length, its crc, the event, its crc
    size = int.from_bytes(data[:8], "little")
    event = event_pb2.Event.FromString(data[12 : 12 + size])
    seen += [(event.step, v.tag, v.simple_value) for v in event.summary.value]
    data = data[16 + size :]
  assert seen == [(7, "objective/kl", 0.5), (8, "overlap/delta", 4.0)]


def test_tensorboard_missing_says_what_to_install(tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, "tensorboardX", None)
  with pytest.raises(ImportError, match=r"oppo-jax\[tensorboard\]"):
    metrics.TensorBoardWriter(tmp_path)


def batch(**changes):
  arrays = dict(
    uid=np.array([4, 7], np.int32),
    sequences=np.array([[1, 2, 3, 0], [5, 6, 0, 0]], np.int32),
    behavior_logprobs=np.array([[-0.5, -1.5], [-2.0, 0.0]], np.float32),
    ref_logprobs=np.array([[-0.25, -1.0], [-2.5, 0.0]], np.float32),
    values=np.array([[0.5, 0.25], [0.125, 0.0]], np.float32),
    scores=np.array([1.0, -1.0], np.float32),
  )
  return {**arrays, **changes}


def hash_of(*batches):
  running = metrics.BatchHash()
  for arrays in batches:
    running.update(**arrays)
  return running.hexdigest()


@pytest.mark.parametrize("name", metrics.BatchHash.FIELDS)
def test_every_field_is_in_the_batch_hash(name):
  one_bit = batch()[name].copy()
  one_bit.view(np.uint8).reshape(-1)[0] ^= 1
  assert hash_of(batch(**{name: one_bit})) != hash_of(batch())


def test_batch_hash_tells_order_shape_and_dtype_apart():
  swapped = {k: v[::-1] for k, v in batch().items()}
  base = hash_of(batch())
  assert hash_of(swapped) != base
  assert hash_of(batch(values=batch()["values"].reshape(1, 4))) != base
  assert hash_of(batch(uid=batch()["uid"].view(np.uint32))) != base
  assert hash_of(batch(), swapped) != hash_of(swapped, batch())
  assert hash_of(batch(), swapped) != hash_of(swapped)


def test_batch_hash_ignores_memory_layout_and_byte_order():
  base = hash_of(batch())
  columns = np.asfortranarray(batch()["values"])
  assert hash_of(batch(values=columns)) == base
  swapped = batch()["values"].astype(">f4")
  assert hash_of(batch(values=swapped)) == base
  in_other_order = dict(reversed(batch().items()))
  assert hash_of(in_other_order) == base


def test_batch_hash_goes_on_from_its_hexdigest():
  other = batch(uid=np.array([8, 9], np.int32))
  resumed = metrics.BatchHash(hash_of(batch()))
  resumed.update(**other)
  assert resumed.hexdigest() == hash_of(batch(), other)
  assert metrics.BatchHash().hexdigest() == ""


def test_batch_hash_refuses_missing_fields_and_device_arrays():
  arrays = batch()
  del arrays["values"]
  with pytest.raises(TypeError, match="values"):
    metrics.BatchHash().update(**arrays)
  with pytest.raises(TypeError, match="scores is on the device"):
    metrics.BatchHash().update(**batch(scores=jnp.zeros(2)))


def test_params_hash_follows_content_not_the_order_of_keys():
  tree = {"a": {"w": jnp.ones((2, 3)), "b": jnp.zeros(3, jnp.bfloat16)}}
  base = metrics.params_sha256(tree)
  reordered = {"a": {"b": tree["a"]["b"], "w": tree["a"]["w"]}}
  assert metrics.params_sha256(reordered) == base
  changes = [
    {"a": {"w": jnp.ones((3, 2)), "b": tree["a"]["b"]}},
    {"a": {"w": tree["a"]["w"], "b": jnp.zeros(3, jnp.float16)}},
    {"a": {"w": tree["a"]["w"], "c": tree["a"]["b"]}},
    {"a": {"w": tree["a"]["w"].at[1, 2].add(1e-6), "b": tree["a"]["b"]}},
  ]
  for changed in changes:
    assert metrics.params_sha256(changed) != base
