# SPDX-License-Identifier: Apache-2.0
"""The tables of README.md, made from the results in benchmarks/results/.

  python -m benchmarks.tables

A table stands between `<!-- table: NAME -->` and `<!-- end -->`, and says under
itself how its numbers came about. `tests/tables_test.py` holds the README to
the results.
"""

import json
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
README = ROOT / "README.md"
_PLACE = re.compile(
  r"(<!-- table: (?P<name>\w+) -->\n).*?(?=<!-- end -->)", re.DOTALL
)


def rows(header, lines):
  """A Markdown table; the first column is text, the others are numbers."""
  yield "| " + " | ".join(header) + " |"
  yield "|---" + "|---:" * (len(header) - 1) + "|"
  for line in lines:
    yield "| " + " | ".join(map(str, line)) + " |"


def source(result):
  """How a result came about, in one line."""
  return (
    f"`{result['command']}`; {result['processor']}, {result['cores']} cores,"
    f" jax {result['jax']}, Python {result['python']}"
  )


def peers(load):
  """CPU and wall seconds per step, and peak memory, of every trainer."""
  titles = {
    "peers_lognormal": "log-normal",
    "peers_full": "full",
    "peers_one_core": "log-normal, one core",
  }
  lines, sources = [], []
  for name, title in titles.items():
    result = load(name)
    sources.append(source(result))
    ((_, found),) = result["workloads"].items()
    for who, s in found["means"].items():
      best = min(m["cpu_s_per_1000"] for m in found["means"].values())
      lines.append(
        (
          f"{title}: {who}",
          f"{s['wall_s']:.2f}",
          f"{s['cpu_s']:.2f}",
          f"{s['cpu_s_per_1000']:.2f}",
          f"{s['cpu_s_per_1000'] / best:.2f}",
          f"{s['peak_rss_mib']:.0f}",
        )
      )
  header = (
    "lengths, trainer",
    "wall s",
    "CPU s",
    "CPU s / 1000 tokens",
    "to the best",
    "peak MiB",
  )
  yield from rows(header, lines)
  yield ""
  yield from (f"{s}  " for s in sources)


def arms(load):
  """Time of a step, arm by arm."""
  result = load("step")
  ((_, found),) = result["workloads"].items()
  base = found["arms"]["serial"]["tokens_per_s"]
  yield from rows(
    (
      "arm",
      "step s",
      "decode",
      "score",
      "update",
      "ticks",
      "tokens/s",
      "to serial",
      "staleness",
    ),
    [
      (
        name,
        f"{s['mean_wall_s']:.2f}",
        f"{s['decode_s']:.2f}",
        f"{s['score_s']:.2f}",
        f"{s['update_s']:.2f}",
        f"{s['ticks']:.0f}",
        f"{s['tokens_per_s']:.0f}",
        f"{s['tokens_per_s'] / base:.2f}",
        f"{s['staleness']:.2f}",
      )
      for name, s in found["arms"].items()
    ],
  )
  yield ""
  yield source(result)


def halved(load):
  """A `serial` step, and one of half the lengths."""
  result = load("halved")
  found = {
    workload: of["arms"]["serial"]
    for workload, of in result["workloads"].items()
  }
  first = next(iter(found.values()))
  keys = ("mean_wall_s", "mean_cpu_s", "decode_s", "score_s", "update_s")
  lines = [
    (
      workload.replace("_", ", "),
      *(f"{s[key]:.2f}" for key in keys),
      f"{first['mean_cpu_s'] / s['mean_cpu_s']:.2f}",
    )
    for workload, s in found.items()
  ]
  header = ("lengths", "wall s", "CPU s", "decode", "score", "update", "times")
  yield from rows(header, lines)
  yield ""
  yield source(result)


def update(load):
  """Gradients of one batch, laid out in different ways."""
  result = load("update")
  yield from rows(
    ("gradients", "wall s", "CPU s", "tokens computed", "temporary MiB"),
    [
      (
        case["name"],
        f"{case['wall_s']:.2f}",
        f"{case['cpu_s']:.2f}",
        case["tokens_computed"],
        f"{case['temporary_bytes'] / 2**20:.0f}",
      )
      for case in result["cases"]
    ],
  )
  yield ""
  yield source(result)


def overlap(load):
  """What scoring costs beside decoding, and how busy the devices were."""
  result = load("overlap")
  lines = []
  for placement, s in result["cases"].items():
    both = s["busy"]["together"]
    share = lambda seconds: f"{seconds / both['wall_s']:.2f}"  # noqa: B023
    lines.append(
      (
        placement,
        f"{s['decode_s']:.2f}",
        f"{s['score_s']:.2f}",
        f"{s['together_s']:.2f}",
        f"{s['hidden']:.2f}",
        ", ".join(map(share, both["busy_s"].values())),
        share(both["shared_s"]),
      )
    )
  header = (
    "placement",
    "decode s",
    "score s",
    "together s",
    "hidden",
    "busy, by device",
    "two at once",
  )
  yield from rows(header, lines)
  yield ""
  yield source(result)


TABLES = {
  "peers": peers,
  "halved": halved,
  "arms": arms,
  "overlap": overlap,
  "update": update,
}


def load(name):
  """A result by the name of its file."""
  return json.loads((RESULTS / f"{name}.json").read_text())


def fill(text):
  """The text with every table made anew."""

  def table(match):
    lines = TABLES[match["name"]](load)
    return match[1] + "\n" + "\n".join(lines) + "\n\n"

  return _PLACE.sub(table, text)


def main():
  text = README.read_text()
  README.write_text(fill(text))
  sys.stdout.write(f"{len(_PLACE.findall(text))} tables in {README.name}\n")


if __name__ == "__main__":
  main()
