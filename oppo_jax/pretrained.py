# SPDX-License-Identifier: Apache-2.0
"""The four models of a run, and those of them that come from folders.

  policy      decodes, is trained     Llama, Qwen2, GPT-2, ...
  reference   frozen                  the policy's own, or any language model
  reward      frozen                  *ForSequenceClassification
  critic      trained                 like the reward model or like the policy

Each may be of another family and size, but all read the same token ids. What
does not fit ends a run before any weight is read, with a line that names it.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from oppo_jax import hf, score, tokenizer, types
from oppo_jax.models import base as models_base

MakeModel = Callable[[str], models_base.Model]  # of a head: "lm", "scalar"

# Keys of config.load, and the model of `Models` each is for.
ROLES = {
  "policy": "policy",
  "reference": "reference",
  "reward_model": "reward",
  "critic": "critic",
}


class Models(NamedTuple):
  """What a run computes with.

  Attributes:
    policy: with the "lm" head.
    reference: likewise.
    reward: with the "scalar" head.
    critic: likewise.
  """

  policy: models_base.Model
  reference: models_base.Model
  reward: models_base.Model
  critic: models_base.Model


@contextlib.contextmanager
def _named(role: str, folder: str) -> Iterator[None]:
  """Errors in the block become one line that names the key."""
  try:
    yield
  except (ValueError, OSError) as e:
    raise ValueError(f"config.load.{role}={folder!r}: {e}") from e


def folders(load: Mapping[str, Any]) -> dict[str, str]:
  """Role -> folder, of those that are given."""
  return {role: load[role] for role in ROLES if load[role]}


def make_models(
  load: Mapping[str, Any],
  *,
  critic_init: str,
  choices: Mapping[str, Any],
  fresh: MakeModel,
) -> Models:
  """The models of a run.

  Args:
    load: a folder or "" for each of `ROLES`.
    critic_init: where a critic without a folder starts from: "reward",
      "policy" or "random".
    choices: values of `hf.CHOICES`, but for the head.
    fresh: makes the model of a policy without a folder, by its head.

  Raises:
    ValueError: a folder is not there, or not of a known model; names the key.
  """
  like_policy = fresh
  if load["policy"]:
    like_policy = lambda head: hf.make_model(
      load["policy"], head=head, **choices
    )
  found = {}
  for role, folder in folders(load).items():
    with _named(role, folder):
      head = "lm" if role in ("policy", "reference") else "scalar"
      found[role] = hf.make_model(folder, head=head, **choices)
  policy = found.get("policy") or like_policy("lm")
  scalar = like_policy("scalar")
  reward = found.get("reward_model") or scalar
  critic = reward if critic_init == "reward" else scalar
  return Models(
    policy=policy,
    reference=found.get("reference") or policy,
    reward=reward,
    critic=found.get("critic") or critic,
  )


def check(
  load: Mapping[str, Any],
  models: Models,
  tokens: tokenizer.Tokenizer,
  *,
  row_len: int,
  tile_len: int,
) -> None:
  """That every folder holds what it should; reads no weights.

  Ids beyond those of the tokenizer may be drawn where the policy's embedding
  has rows for them; a smaller embedding of a scorer reads its last row then.

  Args:
    load: of the config.
    models: of `make_models`.
    tokens: tokenizer of the policy.
    row_len: L.
    tile_len: T of the scorers.

  Raises:
    ValueError: tensors are missing, or a model cannot read the policy's rows:
      another vocabulary, too short; names the key.
  """
  for role, folder in folders(load).items():
    model = getattr(models, ROLES[role])
    with _named(role, folder):
      hf.check(folder, _as_stored(role, folder, model))
      if role == "reward_model" and load["retokenize"]:
        continue  # it reads other ids, and its own rows
      _check_rows(folder, model, row_len=row_len, tile_len=tile_len)
      if model.vocab_size < tokens.vocab_size:
        raise ValueError(
          f"its embedding has {model.vocab_size} rows, the policy's tokenizer"
          f" {tokens.vocab_size} ids"
        )
      if role != "policy":
        hint = ""
        if role == "reward_model":
          hint = "; with load.retokenize=True it reads the text instead"
        _check_ids(folder, tokens, hint)
  wrong = [i for i in tokens.eos_ids if i >= models.policy.vocab_size]
  if wrong:
    raise ValueError(
      f"the tokenizer names EOS ids {wrong}, the policy's embedding has"
      f" {models.policy.vocab_size} rows"
    )


def load_params(
  role: str, folder: str, model: models_base.Model
) -> types.Params:
  """Float32 parameters of a folder; without a head where it has another."""
  with _named(role, folder):
    stored = _as_stored(role, folder, model)
    params = hf.load_params(folder, stored, dtype="float32")
  return params if stored.is_lm == model.is_lm else trunk(params)


def trunk(params: types.Params) -> types.Params:
  """All but the head."""
  return {name: x for name, x in params.items() if name != "out"}


def _as_stored(
  role: str, folder: str, model: models_base.Model
) -> models_base.Model:
  """The model with the head that the folder has, where either will do."""
  if role != "critic" or hf.head(folder) == "scalar":
    return model
  kept = {k: getattr(model.config, k) for k in hf.CHOICES}
  return hf.make_model(folder, **kept | {"head": "lm"})


def _check_rows(
  folder: str, model: models_base.Model, *, row_len: int, tile_len: int
) -> None:
  """Raises a ValueError if the model is for shorter rows."""
  limit = hf.longest(folder, model)
  if limit is not None and row_len > limit:
    raise ValueError(
      f"rows of max_prompt_len + max_response_len = {row_len} tokens are"
      f" longer than the {limit} that the model is for"
    )
  columns = score.cache_len(row_len, tile_len)
  if 0 < model.config.max_row_len < columns:
    raise ValueError(
      f"rows of {row_len} tokens, {columns} with the last tile"
      f" (score.tile_len={tile_len}) filled up, are longer than the"
      f" {model.config.max_row_len} that the model can read"
    )


def _check_ids(folder: str, tokens: tokenizer.Tokenizer, hint: str) -> None:
  """Raises a ValueError if the folder's tokenizer gives ids another meaning."""
  theirs = tokenizer.vocabulary(folder)
  if theirs is None:  # nothing says that ids mean anything else
    return
  for token, i in sorted(tokens.hf.get_vocab().items(), key=lambda x: x[1]):
    if theirs.get(token) != i:
      other = next((repr(t) for t, k in theirs.items() if k == i), "nothing")
      raise ValueError(
        f"has another tokenizer than the policy, which says {token!r} by id"
        f" {i}: here that is {other}{hint}"
      )
