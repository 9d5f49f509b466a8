"""Every key of a training run, declared once, with its unit and reason.

Reproduces: nothing by itself; the other files start from it and change what they mean to change.
Machine: any.
Expected: no score; training it as it stands fails, since it names no model.
Command: python -m searchr1_jax.train --config=configs/grpo_tiny.py --workdir=runs/tiny
"""

from __future__ import annotations

import ml_collections
from ml_collections import config_dict


def get_config() -> ml_collections.ConfigDict:
  c = ml_collections.ConfigDict()
  c.seed = 0                  # addresses all randomness, together with step, question and sample
  # May be raised when a run is resumed; its warm-up stays as long as its first `steps` made it.
  c.steps = 500               # training steps: rollout batches

  c.machine = ""              # what it is made for: a target of `searchr1_jax.plan`

  c.model = dict(
      path="",                # Hugging Face folder or hub id of the policy
      dtype="float32",        # of activations when training: bfloat16 on accelerators, float32 on CPU
      rollout_dtype="float32",  # of parameters and cache when sampling
      scan_layers=True,       # compile one layer and loop, or all of them in a row (small models)
      remat="none",           # recompute in the backward pass: none, dots (keep matmuls), full
      logits_tokens=8192,     # tokens of a batch (on all devices) with logits in memory at a time
      reference_memory="device",  # where the reference waits to be used: device, or pinned_host
  )
  c.world = dict(
      name="",                # generate the data instead of reading it: tiny or hard; "" reads it
      seed=0,                 # of the entities and questions that train
      test_seed=1,            # of the entities and questions held out
  )
  c.data = dict(
      train=(),               # question sets: files (.jsonl, .parquet) or tfds:NAME/SPLIT; the
                              # rows' data_source, or else a file's name, is the dataset's name
      test=(),                # question sets that are evaluated, none dropped
      questions=512,          # questions a training step
  )
  c.retriever = dict(
      index="",               # folder made by `python -m retriever.build`, http://host:port of
                              # `python -m retriever.serve` (replicas: with commas), online:NAME, or
                              # a mapping as JSON text (retriever/opening.py)
      engine="index",         # index, or a control: empty (finds nothing), random, noisy
      noise=0.3,              # noisy: share of queries whose passages are random ones
      record="",              # file to which every search is written, and from which it is repeated
  )
  c.prompt = dict(
      template="search",      # search, reasoning (no search), or a text with {question} in it
      chat_template="auto",   # auto: wherever the tokenizer has one; yes; no
  )
  c.episode = dict(
      max_turns=4,            # turns that may search; one last turn follows
      max_searches=config_dict.placeholder(int),  # executed searches, where fewer than max_turns
      max_turn_tokens=500,    # sampled tokens a turn
      max_episode_tokens=4096,  # the prompt included
      max_observation_tokens=500,  # inserted tokens a search
      top_k=3,                # passages a search
  )
  c.rollout = dict(
      rows=96,                # episodes a device holds at a time, those that search included
      cache_gib=config_dict.placeholder(float),  # memory for caches; fewer rows than that are cut
      seats=(16, 64),         # rows of a device that write at a time: each size compiles
      seat_tokens=32,         # tokens a row writes before the next can be served: compiles
      row_buckets=(4, 16),    # rows of one prefill call: each compiles
      chunk_buckets=(64, 512),  # tokens a row of one prefill call: each compiles
      widths=(1024, 2048, 4096),  # tokens of a row that a call reads: each compiles
      deterministic=False,    # the same bytes from the same seed; fixes shapes, waits for searches
      in_flight=4,            # search requests at a time
      search_seconds=120.0,   # until a search counts as failed
      temperature=1.0,        # of sampling in training, above 0: a gradient needs samples
      top_p=1.0,              # mass kept when sampling; 1 keeps all
      top_k=0,                # ids kept when sampling; 0 keeps all
  )
  c.algo = dict(
      name="ppo",             # ppo (value model, GAE), grpo or rloo (groups)
      group_size=1,           # samples a question
      kl_coef=0.001,          # price of one nat from the reference
      kl_in="reward",         # reward (charged a token, before the advantages) or loss
      kl_kind="k1",           # estimator: k1, abs, k2, k3
      kl_controller="fixed",  # fixed, or adaptive towards kl_target (only with kl_in = reward)
      kl_target=6.0,          # nats a token that the adaptive controller aims at
      kl_horizon=10000,       # episodes over which it reacts
      clip_low=0.2,           # how far below 1 a ratio may still gain
      clip_high=0.2,          # how far above 1
      dual_clip=config_dict.placeholder(float),  # bound on a bad token's ratio, above 1
      ratio="token",          # token, or sequence (GSPO)
      entropy_coef=0.001,     # bonus for a nat of entropy
      aggregation="seq-mean",  # seq-mean, token-mean, seq-sum-norm, microbatch-token-mean
      group_std=True,         # divide by the group's std; False is Dr.GRPO
      drop_flat_groups=False,  # leave out groups that teach nothing: what is lost is the gradient
                              # of their KL, entropy and LLDS terms
      mask_observations=True,  # False: the paper's ablation, observations train as if written
      gamma=1.0,              # discount a token (ppo)
      lam=1.0,                # GAE's lambda (ppo)
      value_clip=0.5,         # how far a value may move and still gain (ppo)
      value_only_steps=0,     # first steps in which only the value learns (ppo)
      llds_coef=0.0,          # weight of lost likelihood (LLDS); 0 leaves it out
      importance_cap=config_dict.placeholder(float),  # truncated importance sampling, usually 2
      epochs=1,               # passes over a rollout batch
      updates_per_batch=2,    # optimizer steps a rollout batch, all epochs together
      compat="",              # search-r1 restores the published arithmetic; "" is ours
  )
  c.optimizer = dict(
      policy_lr=1e-6,         # after the warm-up, which counts training steps
      policy_warmup=0.285,    # share of the run
      value_lr=1e-5,
      value_warmup=0.015,
      b1=0.9, b2=0.999, eps=1e-8,  # AdamW's
      weight_decay=0.01,      # decoupled
      moments_memory="device",  # where Adam's moments wait for their update: device, or pinned_host
      clip_norm=1.0,          # of the gradient, over all parameters
  )
  c.batch = dict(
      lengths=(512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048, 2560, 3072, 3584, 4096),
                              # tokens a row of an update batch; each that occurs compiles
      tokens=65536,           # tokens of one update batch: its rows are tokens // length
  )
  c.mesh = dict(data=1, fsdp=1, tensor=1)  # devices along each axis: all, if processes share a run
  c.reward = dict(
      name="em",              # em, f1, subem, em_format
      structure_weight=0.2,   # em_format's s
      format_weight=0.1,      # em_format's f
      retrieval_hit=0.0,      # added where a shown passage holds a gold answer
      search_cost=0.0,        # taken off a search
      no_answer_penalty=0.0,  # taken off where no answer was given
  )
  c.eval = dict(
      every=50,               # training steps between evaluations; 0 only before and after
      around=True,            # evaluate before the first and after the last step
      questions=0,            # of the test sets at most; 0 takes all
      sampled=True,           # also at the training temperature, beside greedy
  )
  c.checkpoint = dict(
      every=100,              # training steps
      keep=3,                 # newest steps kept; the best by EM beside them
      best=True,
  )
  c.log = dict(
      trajectories=4,         # episodes a step written to trajectories.txt
      tensorboard=True,
  )
  c.limits = dict(
      lost_share=0.2,         # share of a batch lost to retrieval errors above which it is repeated
      lost_batches=3,         # such batches in a row after which the run stops
      bad_updates=3,          # updates with a non-finite gradient in a row after which it stops
  )
  return c
