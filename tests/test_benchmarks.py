"""Each benchmark prints one JSON line with the keys that its peers' scripts print."""

from __future__ import annotations

import json

import pytest

SMALL = "--layers 1 --d 32 --heads 2 --kv-heads 1 --vocab 64 --repeats 1"
RUNS = {
    "rollout": ("--N 2 --P 8 --T 4 --R 8 --turns 2",
                {"rollout_s", "first_rollout_s", "generated_tok_s", "prefilled_tokens"}),
    "schedule": ("--questions 6 --seats 2 --shortest 2 --turn 6 --latency 0.01",
                 {"long_tail", "slow_search"}),
    "update": ("--B 2 --L 16 --prompt 4", {"step_s", "first_call_s"}),
}


@pytest.mark.parametrize("name", RUNS)
def test_one_json_line_with_the_keys_of_the_peers(name, run_python):
  sizes, keys = RUNS[name]
  argv = [f"benchmarks.{name}", *sizes.split(), *SMALL.split()]
  done = run_python(f"import runpy, sys; sys.argv = {argv!r}\n"
                    f"runpy.run_module('benchmarks.{name}', run_name='__main__')", devices=1)
  (line,) = done.stdout.strip().splitlines()
  found = json.loads(line)
  assert keys <= found.keys()
  for key in keys & {"rollout_s", "step_s"}:
    assert found[key].keys() == {"median", "min", "max"}
  if name == "schedule":
    assert found["long_tail"]["occupancy"] <= 1 and found["slow_search"]["in_step_s"] > 0
  if name == "rollout":
    # Two rows: the prompt of 8 once, and one insertion of 8 after the first of two turns.
    assert found["prefilled_tokens"] == 2 * (8 + 8)
    assert found["generated_tokens"] == 2 * 2 * 4
