"""Program: a corpus becomes an index folder, whole or not at all.

  python -m retriever.build corpus.jsonl --out DIR [--encoder hashing|FOLDER|HUB-ID]
      [--index flat|mesh|ivf|hnsw|pq|bm25] [--skip-bad] [--overwrite]

A build that was killed goes on where it stopped when the command is repeated. A published index of
FAISS comes in as it is, beside its corpus: --faiss e5_Flat.index --encoder intfloat/e5-base-v2.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from retriever import corpus as corpus_lib
from retriever import encoders, stages
from retriever import manifest as manifest_lib
from retriever.manifest import Fingerprint, Manifest
from retriever.protocol import CorpusError, UserError
from retriever.stages import Recipe


def main(argv: Sequence[str] | None = None) -> int:
  """Builds as the command line says; returns the exit code."""
  parser = argparse.ArgumentParser("python -m retriever.build", allow_abbrev=False,
                                   description="Builds a search index from a jsonl corpus.")
  parser.add_argument("corpus", type=Path, help='.jsonl, .gz or .zst, {"id", "contents"} a line')
  parser.add_argument("--out", type=Path, required=True, help="the index folder to write")
  parser.add_argument("--encoder", default="hashing",
                      help="hashing (needs no model), or a Hugging Face folder or hub id of a BERT")
  parser.add_argument("--rule", help="how the encoder pools and prefixes, where its name doesn't "
                      f"say: {', '.join(encoders.RULES)}")
  parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="what a BERT computes in "
                      "(float32; on accelerators bfloat16 is faster)")
  parser.add_argument("--dim", type=int, help="of the hashing encoder (default 4096)")
  parser.add_argument("--index", choices=stages.KINDS, help="(default flat) "
                      "flat and mesh compare all vectors, ivf, hnsw and pq some, bm25 words")
  parser.add_argument("--factory", help="FAISS's own word for the index, such as IVF4096,SQ8")
  parser.add_argument("--faiss", type=Path, help="a finished index file of this corpus, to take in")
  parser.add_argument("--skip-bad", action="store_true", help="leave out lines without a passage")
  parser.add_argument("--overwrite", action="store_true", help="replace another index in DIR")
  args = parser.parse_args(argv)
  try:
    recipe = make_recipe(args.corpus, encoder=args.encoder, dim=args.dim, rule=args.rule,
                         dtype=args.dtype, index=args.index, factory=args.factory,
                         faiss_file=args.faiss,
                         skip_bad=args.skip_bad)
    manifest, fresh = _build(recipe, args.out, args.overwrite, quiet=False)
  except (UserError, OSError) as e:
    print(f"retriever.build: {e}", file=sys.stderr)
    return 2
  except KeyboardInterrupt:
    print("retriever.build: stopped; repeat the command to go on", file=sys.stderr)
    return 130
  size = sum(f.bytes for f in manifest.files.values())
  encoder = f"{recipe.encoder['name']} {recipe.encoder['dim']}, " if recipe.encoder else ""
  skipped = f", {manifest.skipped:,} bad lines skipped" if manifest.skipped else ""
  print(f"{args.out}: {manifest.rows:,} passages{skipped}, {encoder}{recipe.index['kind']}, "
        f"{size / 1e6:,.1f} MB, fingerprint {manifest.fingerprint[:12]}"
        f"{'' if fresh else ' (already built, unchanged)'}")
  return 0


def build(corpus_path: str | Path, out_dir: str | Path, *, encoder: str = "hashing",
          dim: int | None = None, rule: str | None = None, dtype: str | None = None,
          index: str | None = None, factory: str | None = None,
          faiss_file: str | Path | None = None,
          skip_bad: bool = False, overwrite: bool = False, quiet: bool = False) -> Manifest:
  """Builds the index of a corpus in `out_dir`, unless it is there already."""
  recipe = make_recipe(Path(corpus_path), encoder=encoder, dim=dim, rule=rule, dtype=dtype,
                       index=index, factory=factory, faiss_file=faiss_file and Path(faiss_file),
                       skip_bad=skip_bad)
  return _build(recipe, Path(out_dir), overwrite, quiet)[0]


def make_recipe(corpus_path: Path, *, encoder: str, dim: int | None, rule: str | None,
                dtype: str | None, index: str | None, factory: str | None,
                faiss_file: Path | None, skip_bad: bool) -> Recipe:
  """What is to be built, checked as far as it can be before anything is read."""
  if faiss_file and (index or factory):
    raise CorpusError("--faiss takes in a finished index; leave out --index and --factory")
  index = index or "flat"
  if index not in stages.KINDS:
    raise CorpusError(f"index {index!r} is not known, choose one of {', '.join(stages.KINDS)}")
  if factory and index not in stages.TRAINED:
    raise CorpusError(f"--factory says how FAISS is to build; name ivf, hnsw or pq as --index, not "
                      f"{index}")
  if dim is not None and (encoder != "hashing" or index == "bm25"):
    raise CorpusError("--dim is of the hashing encoder; leave it out")
  if index == "bm25" and encoder != "hashing":
    raise CorpusError("--index bm25 compares words; leave out --encoder")
  about: dict = {"kind": "faiss" if faiss_file else index}
  if factory:
    about["factory"] = factory
  if faiss_file:
    about["file"] = faiss_file.name
  if encoder == "hashing" and (rule or dtype):
    raise CorpusError("--rule and --dtype are of sentence encoders; leave them out")
  options = {"dim": dim} if encoder == "hashing" else {"rule": rule, "dtype": dtype}
  spec = None if index == "bm25" else encoders.wanted_spec(encoder, **options)
  corpus_path = corpus_path.absolute()  # a build may be gone on with from another folder
  return Recipe(corpus_path, Fingerprint.of(corpus_path), spec, about, skip_bad,
                faiss_file and faiss_file.absolute())


def _build(recipe: Recipe, out: Path, overwrite: bool, quiet: bool) -> tuple[Manifest, bool]:
  """The manifest, and whether anything had to be built."""
  out = out.resolve()
  if out.exists() and not out.is_dir():
    raise CorpusError(f"{out} is a file, wanted a folder; name another")
  if out.is_mount():
    raise CorpusError(f"{out} is a mount point, name a folder in it")
  for path in (recipe.corpus_path, recipe.faiss_file):
    if path and out in path.parents:
      raise CorpusError(f"{path} lies in the folder that is to be written; name another for --out")
  if out.exists() and any(out.iterdir()):
    kept = _already_there(out, recipe, overwrite)
    if kept is not None:
      return kept, False
  out.parent.mkdir(parents=True, exist_ok=True)
  with stages.Workshop(out, recipe, quiet) as workshop:
    manifest = workshop.fill()
    workshop.put_in_place()
  return manifest, True


def _already_there(out: Path, recipe: Recipe, overwrite: bool) -> Manifest | None:
  """The manifest in `out` if it is the one wanted; None if it may be replaced."""
  if not (out / manifest_lib.NAME).is_file():
    raise CorpusError(f"{out} is not empty and holds no index; name another folder")
  try:
    old = Manifest.load(out)
    for name, fingerprint in old.files.items():
      fingerprint.verify(out / name, "build again with --overwrite")
    if corpus_lib.is_packed(recipe.corpus_path):  # its text lies in the folder too
      old.corpus.verify(out / old.corpus_path, "build again with --overwrite")
  except CorpusError:
    if overwrite:
      return None
    raise
  if not recipe.made(old, out):
    if overwrite:
      return None
    what = ("another corpus" if old.source != recipe.source else
            f"{dict(old.index)} with encoder {old.encoder and dict(old.encoder)}")
    raise CorpusError(f"{out} holds the index of {what}; name another folder, or replace it with "
                      "--overwrite")
  if not corpus_lib.is_packed(recipe.corpus_path):
    seen_from_out = os.path.relpath(recipe.corpus_path, out)
    if seen_from_out != old.corpus_path:  # the same corpus, moved
      old = Manifest(**{**vars(old), "corpus_path": seen_from_out})
      old.save(out)
  return old


if __name__ == "__main__":
  sys.exit(main())
