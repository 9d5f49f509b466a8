"""From a config to the parts of a run: read once, checked before anything compiles."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from typing import Any, Sequence

import jax
import jax.numpy as jnp
import ml_collections

from retriever import opening
from retriever.protocol import SearchEngine
from searchr1_jax.algo import collate, losses, update
from searchr1_jax.model import decoder, sharding, shapes, weights
from searchr1_jax.rollout import draw, searches, slots, stops
from searchr1_jax.rollout.engine import Engine
from searchr1_jax.rollout.episode import EpisodeSettings, Rules, make_rules
from searchr1_jax.run import cli, data
from searchr1_jax.text import actions, prompts, rewards
from searchr1_jax.text.tokenizer import Tokenizer
from searchr1_jax.types import Question, Score, Trajectory, UserError
from searchr1_jax.worlds import files as world_files

ALGORITHMS = ("ppo", "grpo", "rloo")
# Which numbers each key takes; ( and ) leave the end itself out. A key set to None is not in use.
BOUNDS = {
    "[0, 4294967296)": ("seed", "world.seed", "world.test_seed"),  # 32 bits address randomness
    "[0, inf)": (
        "steps", "episode.max_turns", "episode.max_searches", "algo.kl_coef",
        "algo.clip_high", "algo.llds_coef", "algo.value_only_steps", "optimizer.policy_lr",
        "optimizer.value_lr", "optimizer.weight_decay", "eval.every", "eval.questions",
        "log.trajectories"),
    "[0.001, inf)": ("rollout.temperature",),  # logits are divided by it, in float32
    "[0, 2147483648)": ("rollout.top_k",),  # an int32 on the device
    "(0, inf)": ("algo.kl_target", "algo.value_clip", "algo.importance_cap", "optimizer.eps",
                 "optimizer.clip_norm", "rollout.cache_gib"),
    f"(0, {searches.LONGEST:.0f}]": ("rollout.search_seconds",),
    "[1, inf)": (
        "model.logits_tokens", "data.questions", "episode.max_turn_tokens",
        "episode.max_episode_tokens", "episode.max_observation_tokens", "episode.top_k",
        "rollout.rows", "rollout.seat_tokens", "rollout.in_flight", "algo.group_size",
        "algo.kl_horizon", "algo.epochs",
        "algo.updates_per_batch", "batch.tokens", "mesh.data", "mesh.fsdp", "mesh.tensor",
        "checkpoint.every", "checkpoint.keep", "limits.lost_batches", "limits.bad_updates"),
    "(1, inf)": ("algo.dual_clip",),
    "[0, 1]": ("algo.gamma", "algo.lam", "optimizer.policy_warmup", "optimizer.value_warmup",
               "limits.lost_share", "retriever.noise"),
    "[0, 1)": ("algo.clip_low", "optimizer.b1", "optimizer.b2"),
    "(0, 1]": ("rollout.top_p",),
}
TEMPLATES = {"search": prompts.SEARCH_PROMPT, "reasoning": prompts.REASONING_PROMPT}
_CHAT = {"auto": "auto", "yes": True, "no": False}


@dataclasses.dataclass(frozen=True)
class Policy:
  """A model that can take part in episodes: what training, evaluation and `ask` share."""

  folder: pathlib.Path
  shape: shapes.DecoderShape
  tokenizer: Tokenizer
  engine: Engine
  rules: Rules
  template: str
  chat_template: str | bool
  reward: dict[str, Any]

  def encode_prompt(self, question: Question) -> tuple[int, ...]:
    """The prompt of a question; a row that brings its own messages is taken at its word."""
    return tuple(self.tokenizer.prompt_ids(
        self.template, question.question, self.chat_template, question.prompt))

  def score(self, trajectory: Trajectory) -> Score:
    """The reward of an episode and everything else worth knowing of it."""
    texts = [self.tokenizer.decode(s.ids) for s in trajectory.segments]
    return rewards.score(trajectory, texts, **self.reward)

  def load_params(self, mesh: jax.sharding.Mesh | None = None) -> decoder.Params:
    """The base model's parameters in float32, layers stacked, laid out over the mesh."""
    return weights.load(self.folder, mesh=mesh)


def check(c: ml_collections.ConfigDict) -> None:
  """Refuses values and combinations that cannot work, before anything is loaded."""
  cli.refuse_not_finite(c)
  _choice("algo.name", c.algo.name, ALGORITHMS)
  _choice("algo.kl_in", c.algo.kl_in, ("reward", "loss"))
  _choice("algo.kl_kind", c.algo.kl_kind, losses.KL_KINDS)
  _choice("algo.kl_controller", c.algo.kl_controller, ("fixed", "adaptive"))
  _choice("algo.aggregation", c.algo.aggregation, losses.AGGREGATIONS)
  _choice("algo.compat", c.algo.compat, ("", "search-r1"))
  _choice("retriever.engine", c.retriever.engine, ("index", "empty", "random", "noisy"))
  _choice("prompt.chat_template", c.prompt.chat_template, tuple(_CHAT))
  _choice("model.remat", c.model.remat, tuple(decoder.REMAT_POLICIES))
  for name in ("model.reference_memory", "optimizer.moments_memory"):
    _choice(name, _value(c, name), sharding.MEMORIES)
  for name in ("model.dtype", "model.rollout_dtype"):
    _choice(name, _value(c, name), ("float32", "bfloat16"))
  _choice("reward.name", c.reward.name, ("em", "f1", "subem", "em_format"))
  for interval, names in BOUNDS.items():
    for name in names:
      _within(interval, name, c)
  for name in ("batch.lengths", "rollout.row_buckets", "rollout.chunk_buckets", "rollout.seats",
               "rollout.widths"):
    if not all(type(n) is int and n > 0 for n in _value(c, name)):  # True is an int too
      raise UserError(f"config.{name} is {_value(c, name)}; wanted whole numbers above 0")
  if c.batch.tokens < (longest := max(c.batch.lengths, default=0)):
    raise UserError(f"config.batch.tokens is {c.batch.tokens}, less than one row of {longest}, the "
                    "longest of config.batch.lengths; raise it")
  _check_algorithm(c.algo)
  if c.model.reference_memory != "device" and not c.algo.kl_coef:
    raise UserError(f"model.reference_memory={c.model.reference_memory} places a reference, and "
                    "algo.kl_coef=0 has none; set model.reference_memory=device")
  episodes = c.data.questions * c.algo.group_size
  if (updates := c.algo.updates_per_batch // c.algo.epochs) > episodes:
    raise UserError(f"{episodes} episodes a step (config.data.questions times algo.group_size) "
                    f"cannot make {updates} updates an epoch; lower config.algo.updates_per_batch")
  if not c.model.path:
    raise UserError("config.model.path is empty; name a Hugging Face folder or a hub id")
  _check_data(c)


def _check_data(c: ml_collections.ConfigDict) -> None:
  """Either a generated world, or files: what is set and not used would mislead."""
  for name in ("data.train", "data.test"):
    value = _value(c, name)
    if not isinstance(value, tuple) or not all(isinstance(v, str) and v for v in value):
      raise UserError(f"config.{name} is {value!r}; wanted a tuple of files, such as "
                      "('train.jsonl',)")
  own = [n for n in ("data.train", "data.test", "retriever.index") if _value(c, n)]
  if c.world.name and own:
    raise UserError(f"config.world.name={c.world.name!r} generates all data, config.{own[0]} would "
                    "not be used; leave it out, or set config.world.name=\"\" to use your own data")
  if not c.world.name and not (c.data.train and c.retriever.index):
    raise UserError("no data: set config.world.name, or config.data.train and "
                    "config.retriever.index")


def _check_algorithm(a: ml_collections.ConfigDict) -> None:
  clash = None
  if a.name in ("grpo", "rloo") and a.kl_in == "reward":
    clash = f"algo.name={a.name} takes no per-token reward; set algo.kl_in=loss"
  elif a.name == "ppo" and a.group_size != 1:
    clash = "algo.name=ppo compares with a value, not with a group; set algo.group_size=1"
  elif a.name == "rloo" and a.group_size < 2:
    clash = "algo.name=rloo compares with the rest of a group; set algo.group_size to 2 or more"
  elif a.name == "ppo" and a.drop_flat_groups:
    clash = "algo.drop_flat_groups needs groups; set it False with ppo"
  elif a.kl_controller == "adaptive" and a.kl_in != "reward":
    clash = "algo.kl_controller=adaptive steers the KL in the reward; set algo.kl_in=reward"
  elif a.updates_per_batch % a.epochs:
    clash = (f"algo.updates_per_batch={a.updates_per_batch} is no multiple of "
             f"algo.epochs={a.epochs}; every epoch makes the same number of updates")
  elif a.llds_coef and a.updates_per_batch == 1:
    clash = ("algo.llds_coef > 0 with one update a batch is 0 by construction: nothing has "
             "fallen yet; raise algo.updates_per_batch")
  elif a.ratio == "sequence" and a.name == "ppo":
    clash = "algo.ratio=sequence (GSPO) gives a sequence one ratio; use it with grpo or rloo"
  elif a.name != "ppo" and a.value_only_steps:
    clash = f"algo.value_only_steps needs a value, and {a.name} has none; set it to 0, or use ppo"
  elif a.importance_cap is not None and not a.mask_observations:
    clash = ("algo.importance_cap compares with the sampler, and no sampler wrote the observations "
             "that algo.mask_observations=False trains; set one of the two back")
  elif a.compat and a.aggregation != "microbatch-token-mean":
    clash = "algo.compat=search-r1 is published with algo.aggregation=microbatch-token-mean"
  if clash:
    raise UserError(clash)


def prepare_world(c: ml_collections.ConfigDict, workdir: pathlib.Path) -> ml_collections.ConfigDict:
  """Writes the generated world where the config asks for one; the config with its files named."""
  if not c.world.name:
    return c
  folder = workdir / f"world-{c.world.name}-{c.world.seed}-{c.world.test_seed}"
  if not (folder / "index").is_dir():
    world_files.write_world(folder, c.world.name, c.world.seed, c.world.test_seed)
  c = c.copy_and_resolve_references()
  c.data.train, c.data.test = (str(folder / "train.jsonl"),), world_files.test_files(folder)
  c.retriever.index = str(folder / "index")
  return c


def open_policy(c: ml_collections.ConfigDict) -> Policy:
  """The model of a config with its tokenizer, its engine and the rules of its episodes."""
  folder = weights.local_folder(c.model.path)
  shape, _ = weights.read_config(folder)
  tokenizer = Tokenizer.load(folder)
  check_lengths(c, shape, str(folder))
  if tokenizer.size > shape.vocab_size:
    raise UserError(f"the tokenizer of {folder} has {tokenizer.size} tokens, its model an output "
                    f"of {shape.vocab_size}; they belong to different models")
  settings = EpisodeSettings(
      max_turns=c.episode.max_turns, max_turn_tokens=c.episode.max_turn_tokens,
      max_episode_tokens=c.episode.max_episode_tokens,
      max_observation_tokens=c.episode.max_observation_tokens, top_k=c.episode.top_k,
      max_searches=c.episode.max_searches)
  automaton = stops.build_automaton(
      tokenizer.token_bytes, [t.encode() for t in actions.STOP_TAGS], shape.vocab_size)
  return Policy(
      folder=folder, shape=shape, tokenizer=tokenizer,
      engine=Engine(shape, engine_shapes(c, shape), automaton, tokenizer.eos_ids, tokenizer.size,
                    jnp.dtype(c.model.rollout_dtype)),
      rules=make_rules(settings, tokenizer.encode_plain, tokenizer.decode_bytes),
      template=TEMPLATES.get(c.prompt.template, c.prompt.template),
      chat_template=_CHAT[c.prompt.chat_template],
      reward=dict(name=c.reward.name, structure=c.reward.structure_weight,
                  final=c.reward.format_weight, retrieval_bonus=c.reward.retrieval_hit,
                  search_cost=c.reward.search_cost,
                  no_answer_penalty=c.reward.no_answer_penalty))


def check_lengths(c: ml_collections.ConfigDict, shape: shapes.DecoderShape, model: str) -> None:
  """Refuses episodes that are longer than a model can be."""
  if c.episode.max_episode_tokens > shape.max_positions:
    raise UserError(f"config.episode.max_episode_tokens is {c.episode.max_episode_tokens}, "
                    f"{model} has positions for {shape.max_positions}; lower it")


def engine_shapes(c: ml_collections.ConfigDict, shape: shapes.DecoderShape) -> slots.EngineShapes:
  """The closed list of rollout shapes; where memory is bounded, no more rows than fit into it."""
  r, length = c.rollout, c.episode.max_episode_tokens
  found = slots.EngineShapes(r.rows, length, r.seat_tokens, tuple(r.seats), tuple(r.row_buckets),
                             tuple(r.chunk_buckets), tuple(r.widths))
  if r.cache_gib is not None:
    row_bytes = decoder.cache_bytes(shape, 1, length, jnp.dtype(c.model.rollout_dtype))
    found = found.within(int(r.cache_gib * 2**30), row_bytes)
  return found.fixed() if r.deterministic else found


def retrieval(c: ml_collections.ConfigDict) -> searches.Retrieval:
  """How searches of a rollout are run."""
  r = c.rollout
  return searches.Retrieval(r.in_flight, r.search_seconds, r.deterministic)


def open_search(c: ml_collections.ConfigDict) -> SearchEngine:
  """The search engine of a config, or one of the controls in its place."""
  r, spec = c.retriever, opening.as_mapping(c.retriever.index)
  if "url" in spec:  # a little sooner than the rollout gives up, so that it is told why
    spec = {"seconds": 0.9 * c.rollout.search_seconds, **spec}
  if r.engine == "empty":
    spec = "empty"
  elif r.engine == "random":
    spec = {"random": spec, "seed": c.seed}
  elif r.engine == "noisy":
    spec = {"noisy": spec, "p": r.noise, "seed": c.seed}
  found = opening.open_engine({"record": spec, "file": r.record} if r.record else spec)
  if found.most is not None and c.episode.top_k > found.most:
    raise UserError(f"config.episode.top_k is {c.episode.top_k}, config.retriever.index gives at "
                    f"most {found.most}; lower it")
  return found


def load_questions(specs: tuple[str, ...], limit: int = 0) -> list[Question]:
  """The sets one after the other; `limit` takes evenly from the whole, 0 takes all."""
  if not specs:
    raise UserError("no question set named; set config.data.train and config.data.test")
  seen: dict[tuple[str, str], str] = {}
  questions = [q for spec in specs for q in data.load_questions(spec, seen=seen)]
  if not limit or limit >= len(questions):
    return questions
  return [questions[i * len(questions) // limit] for i in range(limit)]


def policy_settings(c: ml_collections.ConfigDict) -> update.PolicySettings:
  """The policy's loss, as the config wants it."""
  a = c.algo
  return update.PolicySettings(
      clip_low=a.clip_low, clip_high=a.clip_high, dual_clip=a.dual_clip, ratio=a.ratio,
      kl_loss_coef=a.kl_coef if a.kl_in == "loss" else 0.0, kl_kind=a.kl_kind,
      entropy_coef=a.entropy_coef, llds_coef=a.llds_coef, importance_cap=a.importance_cap,
      compat=bool(a.compat))


def optimizer(c: ml_collections.ConfigDict):
  """AdamW as the config wants it, for policy and value alike."""
  o = c.optimizer
  return update.make_optimizer(b1=o.b1, b2=o.b2, eps=o.eps, weight_decay=o.weight_decay,
                               clip_norm=o.clip_norm)


def batch_shapes(c: ml_collections.ConfigDict) -> collate.BatchShapes:
  """The closed list of update shapes."""
  shapes_ = collate.BatchShapes(tuple(c.batch.lengths), c.batch.tokens, c.mesh.data * c.mesh.fsdp)
  if shapes_.lengths[-1] < c.episode.max_episode_tokens:
    raise UserError(f"config.batch.lengths ends at {shapes_.lengths[-1]}, an episode may have "
                    f"{c.episode.max_episode_tokens} tokens; add that length")
  return shapes_


def weighting(c: ml_collections.ConfigDict) -> collate.Weighting:
  """How tokens are weighed in the losses."""
  return collate.Weighting(c.algo.aggregation, c.episode.max_episode_tokens,
                           c.algo.mask_observations, bool(c.algo.compat))


def mesh(c: ml_collections.ConfigDict,
         devices: Sequence[jax.Device] | None = None) -> jax.sharding.Mesh:
  """The devices of a run: of `devices`, or this process's own and those of its like."""
  return sharding.make_mesh(c.mesh.data, c.mesh.fsdp, c.mesh.tensor, devices)


def training_sampling(c: ml_collections.ConfigDict) -> draw.Sampling:
  """How rollouts of training are drawn."""
  return draw.sampling(c.rollout.temperature, c.rollout.top_p, c.rollout.top_k)


def _value(c: ml_collections.ConfigDict, name: str) -> Any:
  """The value of a dotted key."""
  for part in name.split("."):
    c = c[part]
  return c


def _within(interval: str, name: str, c: ml_collections.ConfigDict) -> None:
  """Refuses a number outside an interval such as `(0, 1]`."""
  value = _value(c, name)
  low, high = map(float, interval[1:-1].split(","))
  reaches, may_reach = interval[0] == "[", interval[-1] == "]"
  if value is None or (low < value or reaches and low == value) and (
      value < high or may_reach and high == value):
    return
  wanted = f"{low:g} or more" if reaches else f"more than {low:g}"
  if high < math.inf:
    wanted += f" and {'at most' if may_reach else 'less than'} {high:.0f}"
  raise UserError(f"config.{name} is {value}; wanted {wanted}")


def _choice(name: str, value: str, choices: tuple[str, ...]) -> None:
  if value not in choices:
    raise UserError(f"config.{name} is {value!r}; choose one of "
                    f"{', '.join(repr(x) for x in choices)}")
