"""Counting what programs cost: bytes and links from HLO text, FLOPs from jaxprs, sums by hand."""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest
import tiny_models as tiny

from configs import base
from searchr1_jax.algo import collate, update
from searchr1_jax.model import decoder, shapes
from searchr1_jax.planning import costs, flops, hlo, programs, targets, whole, workload
from searchr1_jax.rollout import slots
from searchr1_jax.types import TokenBatch, UserError


def text_of(function, *args, **kwargs) -> str:
  return jax.jit(function, **kwargs).lower(*args).compile().as_text()


def moved(text: str, devices: int = 8, host_devices: int = 8, **trips: int) -> hlo.Traffic:
  return hlo.traffic(text, trips, devices, host_devices)


# --- bytes of memory


def test_a_sum_of_two_arrays_reads_both_and_writes_one():
  a = jnp.ones((1000, 10))
  assert moved(text_of(jnp.add, a, a)).memory == 3 * 4 * 10_000


def test_a_loop_counts_as_often_as_it_runs():
  """A scan of 7 steps over [64, 64]: each reads and writes the carry, and takes one slice."""
  def run(x, ws):
    return jax.lax.scan(lambda c, w: (jnp.tanh(c + w), None), x, ws)[0]

  one = 4 * 64 * 64
  found = moved(text_of(run, jnp.ones((64, 64)), jnp.ones((7, 64, 64)))).memory
  # Carry in and out and a slice of ws in each step; XLA may copy the carry once before and after.
  assert 7 * 3 * one <= found <= (7 * 3 + 4) * one + 1000


def test_a_loop_of_unknown_length_runs_as_often_as_its_scope_says():
  def run(n, x):
    with jax.named_scope("write"):
      return jax.lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] * 2), (0, x))[1]

  text = text_of(run, 5, jnp.ones(10_000))
  once, ten = (moved(text, write=n).memory for n in (1, 10))
  assert ten - once == pytest.approx(9 * 2 * 4 * 10_000, rel=0.01)
  assert moved(text, other=10).memory == once


HEADER = "HloModule m, is_scheduled=true\n\n"
SLICED = HEADER + """\
%body (p: f32[100,1000], i: s32[]) -> f32[1,1000] {
  %p = f32[100,1000]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %z = s32[] constant(0)
  ROOT %d = f32[1,1000]{1,0} dynamic-slice(%p, %i, %z), dynamic_slice_sizes={1,1000}
}

ENTRY %main (a: f32[100,1000], i: s32[]) -> f32[1,1000] {
  %a = f32[100,1000]{1,0} parameter(0)
  %i.1 = s32[] parameter(1)
  ROOT %f = f32[1,1000]{1,0} fusion(%a, %i.1), kind=kLoop, calls=%body
}
"""
UPDATED = HEADER + """\
%body (p: f32[100,1000], u: f32[1,1000], i: s32[]) -> f32[100,1000] {
  %p = f32[100,1000]{1,0} parameter(0)
  %u = f32[1,1000]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %z = s32[] constant(0)
  ROOT %d = f32[100,1000]{1,0} dynamic-update-slice(%p, %u, %i, %z)
}

ENTRY %main (a: f32[100,1000], u: f32[1,1000], i: s32[]) -> f32[100,1000] {
  %a = f32[100,1000]{1,0} parameter(0)
  %u.1 = f32[1,1000]{1,0} parameter(1)
  %i.1 = s32[] parameter(2)
  ROOT %f = f32[100,1000]{1,0} fusion(%a, %u.1, %i.1), kind=kLoop, calls=%body
}
"""


NESTED = HEADER + """\
%taken (p: f32[100,1000], i: s32[]) -> f32[1,1000] {
  %p = f32[100,1000]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %z = s32[] constant(0)
  ROOT %d = f32[1,1000]{1,0} dynamic-slice(%p, %i, %z), dynamic_slice_sizes={1,1000}
}

%body (q: f32[100,1000], j: s32[]) -> f32[1,1000] {
  %q = f32[100,1000]{1,0} parameter(0)
  %j = s32[] parameter(1)
  %inner = f32[1,1000]{1,0} fusion(%q, %j), kind=kLoop, calls=%taken
  ROOT %n = f32[1,1000]{1,0} negate(%inner)
}

ENTRY %main (a: f32[100,1000], i: s32[]) -> f32[1,1000] {
  %a = f32[100,1000]{1,0} parameter(0)
  %i.1 = s32[] parameter(1)
  ROOT %f = f32[1,1000]{1,0} fusion(%a, %i.1), kind=kOutput, calls=%body
}
"""


@pytest.mark.parametrize("text", [SLICED, UPDATED, NESTED],
                         ids=["taken out", "put in", "taken out deeper inside"])
def test_of_a_slice_only_the_slice_counts(text):
  assert moved(text).memory == 2 * 4000 + 4  # read, written, and the index


def test_what_a_tpu_keeps_on_the_chip_crosses_no_bus():
  text = HEADER + """\
ENTRY %main (a: f32[1000]) -> f32[1000] {
  %a = f32[1000]{0} parameter(0)
  %b = f32[1000]{0:T(1024)S(1)} copy(%a)
  ROOT %c = f32[1000]{0} negate(%b)
}
"""
  assert moved(text).memory == 2 * 4000


# --- bytes between devices

COLLECTIVE = HEADER + """\
ENTRY %main (a: bf16[64,8]) -> bf16[{out}] {{
  %a = bf16[64,8]{{1,0}} parameter(0)
  ROOT %c = bf16[{out}]{{1,0}} {kind}(%a), {groups}
}}
"""
SPELT, SHORT = "replica_groups={{0,1,2,3},{4,5,6,7}}", "replica_groups=[2,4]<=[8]"


@pytest.mark.parametrize("groups", [SPELT, SHORT])
@pytest.mark.parametrize("kind, out, share", [
    ("all-gather", "256,8", 3), ("all-reduce", "64,8", 1.5), ("reduce-scatter", "16,8", .75),
    ("all-to-all", "64,8", .75), ("collective-permute", "64,8", 1)])
def test_each_collective_brings_what_its_kind_needs(kind, out, share, groups):
  """Of 1024 bytes in a group of 4: a gather brings 3 times that, a ring's all-reduce 2 · 3/4."""
  text = COLLECTIVE.format(kind=kind, out=out, groups=groups)
  found = moved(text)
  assert (found.link, found.network) == (share * 1024, 0)
  # Groups span hosts of two, and their two members there share the way in.
  pairs = kind == "collective-permute"
  assert moved(text, host_devices=2).network == share * 1024 / 2 or pairs


def test_groups_in_short_form_follow_their_axes():
  strided = "replica_groups=[4,2]<=[2,4]T(1,0)"  # {0,4}, {1,5}, …: pairs across the middle
  text = COLLECTIVE.format(kind="all-gather", out="128,8", groups=strided)
  assert moved(text).link == 1024
  assert moved(text, host_devices=4).network == 1024  # 0 and 4 are on different hosts of four


@pytest.mark.parametrize("groups, link, across", [
    ("replica_groups=mesh['a'=1,'b'=8] {'b'}", 7, 7),  # all eight; on hosts of one, all from others
    ("replica_groups=mesh['a'=2,'b'=4] {'b'}", 3, 3),  # 0-3 and 4-7
    ("replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}", 3, 3)])  # evens and odds
def test_groups_are_read_as_axes_of_a_mesh(groups, link, across):
  text = COLLECTIVE.format(kind="all-gather", out=f"{64 * (link + 1)},8", groups=groups)
  assert moved(text).link == link * 1024
  assert moved(text, host_devices=1).network == across * 1024


def test_a_ring_enters_a_host_once():
  """Evens and odds of eight, hosts of four: two members a host share its way in."""
  groups = "replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}"
  text = COLLECTIVE.format(kind="all-gather", out="256,8", groups=groups)
  found = moved(text, host_devices=4)
  assert (found.link, found.network) == (3 * 1024, 3 * 1024 / 2)


def test_devices_written_in_an_unknown_way_are_refused():
  text = COLLECTIVE.format(kind="all-gather", out="256,8", groups="replica_groups=ring(8)")
  with pytest.raises(ValueError, match="unknown way"):
    moved(text)


def test_a_started_collective_is_counted_once_and_apart_from_its_operands():
  text = HEADER + """\
ENTRY %main (a: bf16[64,8]) -> bf16[512,8] {
  %a = bf16[64,8]{1,0} parameter(0)
  %s = (bf16[64,8]{1,0}, bf16[512,8]{1,0}) all-gather-start(%a), replica_groups=[1,8]<=[8]
  ROOT %d = bf16[512,8]{1,0} all-gather-done(%s)
}
"""
  assert moved(text).link == 7 * 1024


def test_collectives_of_a_real_program_are_those_of_its_sharding(run_python):
  """x · w with w [512, 512] cut into 8: gathering it brings 7/8 of a MiB."""
  run_python("""
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
from searchr1_jax.planning import hlo
mesh = jax.make_mesh((8,), ("fsdp",))
put = lambda s: NamedSharding(mesh, s)
def f(x, w):
  return x @ jax.lax.with_sharding_constraint(w, put(P()))
x, w = (jax.ShapeDtypeStruct((512, 512), jnp.float32, sharding=put(P("fsdp"))) for _ in "ab")
text = jax.jit(f, out_shardings=put(P("fsdp"))).lower(x, w).compile().as_text()
found = hlo.traffic(text, {}, 8, 8)
assert found.link == 7 / 8 * 2**20, found
assert found.dot_flops == 2 * 512**3 / 8, found
""")


# --- FLOPs

SHAPE = dataclasses.replace(tiny.random_shape("qwen2", 0), vocab_size=512, width=64, mlp_width=160,
                            layers=3)
TOKENS, ROWS, LENGTH = 4 * 64, 4, 64


def gradient_flops(remat: str, kept: int) -> tuple[float, float]:
  """FLOPs of scoring and of the gradient of 4 x 64 tokens."""
  score, _ = update.decoder_scores(SHAPE, allowed_vocab=512, temperature=1.0, chunk=64,
                                   dtype=jnp.float32, remat=remat, scan=True)
  i, f = jnp.zeros((ROWS, LENGTH), jnp.int32), jnp.zeros((ROWS, LENGTH))
  batch = TokenBatch(i, i, i[:, 0], i[:, :kept], *(f,) * 6, f[:, 0], f[:, 0])
  params = jax.eval_shape(lambda: decoder.init_params(SHAPE, jax.random.key(0)))
  loss = lambda p: jnp.sum(score(p, batch, False).logprobs_BL)
  return tuple(flops.count(jax.make_jaxpr(g)(params), {}) for g in (loss, jax.grad(loss)))


def by_hand(kept: int) -> tuple[float, float, float]:
  """Multiply-adds x 2 of the layers' products, of attention over blocks of queries, of the head."""
  products = shapes.count_parameters(SHAPE) - SHAPE.vocab_size * SHAPE.width * (
      1 if SHAPE.tied_embeddings else 2)
  products -= SHAPE.layers * (2 * SHAPE.width + (SHAPE.heads + 2 * SHAPE.kv_heads)
                              * SHAPE.head_size) + SHAPE.width  # norms and biases multiply nothing
  # A row of 64 is one block of 128 queries, and so the whole square.
  attention = 2 * 2 * ROWS * LENGTH * LENGTH * SHAPE.heads * SHAPE.head_size * SHAPE.layers
  return 2 * TOKENS * products, attention, 2 * ROWS * kept * SHAPE.vocab_size * SHAPE.width


@pytest.mark.parametrize("kept", [LENGTH, LENGTH // 2])
def test_a_score_is_2n_a_token_and_a_gradient_6n(kept):
  score, gradient = gradient_flops("none", kept)
  layers, attention, head = by_hand(kept)
  assert score == pytest.approx(layers + attention + head, rel=0.05)
  # Backward: two products for each; of attention the scores once more; of the head the logits too.
  assert gradient == pytest.approx(3 * layers + 3.5 * attention + 4 * head, rel=0.05)


def test_layers_computed_again_cost_a_forward_pass_more():
  once, again = gradient_flops("none", LENGTH)[1], gradient_flops("full", LENGTH)[1]
  layers, attention, _ = by_hand(LENGTH)
  down = 2 * TOKENS * SHAPE.layers * SHAPE.mlp_width * SHAPE.width  # no gradient needs its result
  assert again - once == pytest.approx(layers - down + attention, rel=0.05)


def test_on_a_mesh_each_device_does_its_share_of_the_flops(run_python):
  """What the jaxpr says of all devices is what the compiled program does on one, times 8."""
  run_python("""
import sys; sys.path.insert(0, "tests")
import jax, tiny_runs, pathlib, tempfile
from searchr1_jax import plan
from searchr1_jax.planning import costs, hlo, targets, workload
world = tiny_runs.world(pathlib.Path(tempfile.mkdtemp()))
c = tiny_runs.config(world, "grpo", mesh__fsdp=4, mesh__data=2, batch__tokens=16 * 192,
                     rollout__rows=8, rollout__seats=(8,), rollout__row_buckets=(8,))
step = plan.open_step(c, targets.find("cpu"), workload.Load())
for p in step.programs(False):
  if p.name.startswith(("log-probs", "policy gradient", "prefill", "decode")):
    lowered, total = costs.lower(p)
    found = hlo.traffic(lowered.compile().as_text(), p.trips, 8, 8).dot_flops
    # XLA may write a product by one number, or of one row, as other than a product.
    assert 0.9 < found / (total / 8) < 1.05, (p.name, found, total / 8)
""", timeout=300)


# --- the whole


def test_residents_take_what_their_shards_take(run_python):
  run_python("""
import jax, jax.numpy as jnp
from searchr1_jax.planning import costs
from searchr1_jax.model import shapes, sharding, weights
shape = shapes.NAMED["Qwen2.5-0.5B"]
params = weights.abstract_params(shape, mesh=sharding.make_mesh(1, 8, 1))
n = shapes.count_parameters(shape)
assert abs(costs.resident(params) - 4 * n / 8) < 0.001 * n  # all but the biases are cut up
""")


@pytest.mark.parametrize("name", ["h100", "H100x8", "tpu", ""])
def test_a_target_that_is_not_there_is_named(name):
  with pytest.raises(UserError, match="h100x8.*v6e-8.*cpu"):
    targets.find(name)


def line(name, phase, calls: float, parts, temporaries=0, makes=(), fetches=()):
  program = programs.Program(phase, name, None, (), calls=calls, makes=makes, fetches=fetches)
  return whole.Line(program, costs.Cost(0, temporaries, 5, *(0.0,) * 5), parts)


def test_a_plan_adds_calls_up_and_takes_the_fullest_moment():
  class Step(programs.Step):
    def __init__(self):
      pass

    residents = {"policy": jax.ShapeDtypeStruct((25,), jnp.float32, sharding=HERE),
                 "rows": jax.ShapeDtypeStruct((50,), jnp.float32, sharding=HERE),
                 "policy moments": jax.ShapeDtypeStruct((50,), jnp.float32, sharding=HERE)}
    pinned = frozenset(["policy moments"])
    episodes, load = 2, workload.Load()

  lines = [line("decode", "rollout", 3.0, {"compute": 1.0, "memory": 2.0, "collectives": 0.5}, 40),
           line("step", "update", 2.0, {"compute": 4.0, "memory": 1.0, "collectives": 1.0}, 10,
                fetches=("policy moments",))]
  found = whole.plan(Step(), targets.TARGETS["h100x8"], lines)
  assert found.step_seconds == 3 * 2.0 + 2 * 4.0
  assert found.collective_share() == (3 * 0.5 + 2 * 1.0) / 14
  assert found.peaks["rollout"] == 100 + 200 + 40 + 5  # moments wait on the host
  assert found.peaks["update"] == 100 + 10 + 5 + 200  # and come for their update
  assert found.fits and found.pinned == 200 * 8


HERE = jax.sharding.SingleDeviceSharding(jax.devices()[0])


def test_a_load_stays_within_the_rules_of_the_episodes():
  rules = base.get_config().episode
  assert workload.Load().within(rules) == workload.Load()
  most = workload.Load(10**6, 9.0, 10**6, 10**6).within(rules)
  assert (most.prompt, most.searches) == (2048, 4.0) and most.length <= 4096
  rules.max_episode_tokens = 1
  assert workload.Load().within(rules).prompt == 1


def test_what_does_not_fit_says_what_is_there_and_what_to_turn():
  small = dataclasses.replace(targets.TARGETS["h100x8"],
                              chip=dataclasses.replace(targets.H100, memory=1000))
  found = whole.Plan(small, [], {"policy": 2**30, "rows": 5 * 2**30}, 0,
                     {"rollout": 6 * 2**30, "update": 2**30}, 1.0, 1.0, workload.Load())
  assert not found.fits
  c = base.get_config()
  told = found.advice(c)
  assert re.search(r"rollout 6\.0 GiB; update 1\.0 GiB; 6\.0 GiB too much.*rows 5\.0, policy 1",
                   told)
  assert "cache_gib" not in told  # the rows together are less than what is too much
  roomier = dataclasses.replace(small, chip=dataclasses.replace(targets.H100, memory=4 * 2**30))
  assert "Try rollout.cache_gib=3;" in dataclasses.replace(found, target=roomier).advice(c)
  assert "pinned_host" in told and "mesh.tensor" not in told  # one device has no heads to split
  c.optimizer.moments_memory, c.algo.kl_coef = "pinned_host", 0.0
  assert "pinned_host" not in found.advice(c)  # done, and there is no reference


SHAPES = slots.EngineShapes(rows=64, slots=4096, tokens=32, seats=(16, 64), row_buckets=(8, 16),
                            chunk_buckets=(256, 512), widths=(1024, 2048))


def test_prefill_calls_insert_each_prompt_and_what_each_search_brings():
  """Eight rows a call (an eighth of 64 seats): 32 prompts are 4 calls, 32 · 2 searches are 8."""
  calls = workload.prefill_calls(workload.Load(), SHAPES, 32.0, 32.0)
  assert calls == {(8, 256, 1024): 4.0,  # 200 tokens behind nothing
                   (8, 512, 1024): 4.0,  # 450 behind 300: 750
                   (8, 512, 2048): 4.0}  # 450 behind 850: 1,300
  long = workload.prefill_calls(workload.Load(1000, 0.0), SHAPES, 32.0, 8.0)
  assert long == {(8, 512, 1024): 2.0}  # in two chunks, one prompt a group of four


def test_decoding_lasts_as_long_as_its_longest_episode():
  """A call ends when an eighth of the turns of 100 tokens have: after 12."""
  load = workload.Load()
  assert workload.decode_steps(load, SHAPES) == 12
  many = workload.decode_calls(load, SHAPES, 640.0)
  assert many == pytest.approx(640 * 300 / 64 / 0.9 / 12)
  assert workload.decode_calls(load, SHAPES, 1.0) == 2 * 300 / 12


def test_every_mini_batch_has_a_batch():
  shapes_ = collate.BatchShapes((1024, 1536, 4096), 65536, 8)
  load = workload.Load()
  assert workload.main_batch(load, shapes_) == (40, 1536, 768)  # 1,400 tokens, 300 of them written
  assert workload.batch_count(load, shapes_, 512, 2) == pytest.approx(512 * 1400 / .85 / 61440)
  assert workload.batch_count(load, shapes_, 4, 2) == 2
