"""Program: a corpus becomes an index folder, whole or not at all.

  python -m retriever.build corpus.jsonl --out DIR [--encoder hashing] [--dim 4096] [--overwrite]
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from retriever import corpus as corpus_lib
from retriever import encoders, faiss_index
from retriever import manifest as manifest_lib
from retriever.manifest import Fingerprint, Manifest
from retriever.protocol import CorpusError

ENCODE_BATCH = 512


def main(argv: Sequence[str] | None = None) -> int:
  """Builds as the command line says; returns the exit code."""
  parser = argparse.ArgumentParser("python -m retriever.build", allow_abbrev=False,
                                   description="Builds a search index from a jsonl corpus.")
  parser.add_argument("corpus", type=Path, help='.jsonl or .jsonl.gz, {"id", "contents"} a line')
  parser.add_argument("--out", type=Path, required=True, help="the index folder to write")
  parser.add_argument("--encoder", choices=sorted(encoders.ENCODERS), default="hashing")
  parser.add_argument("--dim", type=int, default=4096, help="numbers in a vector (default 4096)")
  parser.add_argument("--overwrite", action="store_true", help="replace another index in DIR")
  args = parser.parse_args(argv)
  try:
    manifest, fresh = _build(args.corpus, args.out, args.encoder, args.dim, args.overwrite,
                             quiet=False)
  except (CorpusError, OSError) as e:
    print(f"retriever.build: {e}", file=sys.stderr)
    return 2
  size = sum(f.bytes for f in manifest.files.values())
  print(f"{args.out}: {manifest.rows:,} passages, {args.encoder} {args.dim}, {size / 1e6:,.1f} MB, "
        f"fingerprint {manifest.fingerprint[:12]}{'' if fresh else ' (already built, unchanged)'}")
  return 0


def build(corpus_path: str | Path, out_dir: str | Path, *, encoder: str = "hashing",
          dim: int = 4096, overwrite: bool = False, quiet: bool = False) -> Manifest:
  """Builds the index of a corpus in `out_dir`, unless it is there already."""
  manifest, _ = _build(Path(corpus_path), Path(out_dir), encoder, dim, overwrite, quiet)
  return manifest


def _build(corpus_path: Path, out: Path, encoder: str, dim: int, overwrite: bool,
           quiet: bool) -> tuple[Manifest, bool]:
  """The manifest, and whether anything had to be built."""
  spec = encoders.encoder_class(encoder).wanted_spec(dim)
  source, out = Fingerprint.of(corpus_path), out.resolve()
  if out.exists() and not out.is_dir():
    raise CorpusError(f"{out} is a file, wanted a folder; name another")
  if out.exists() and any(out.iterdir()):
    kept = _already_there(out, corpus_path, source, spec, overwrite)
    if kept is not None:
      return kept, False
  out.parent.mkdir(parents=True, exist_ok=True)
  temporary = _fresh_folder(out, "new")
  try:
    manifest = _fill(temporary, corpus_path, source, spec, out, quiet)
    _put_in_place(temporary, out)
  finally:
    shutil.rmtree(temporary, ignore_errors=True)
  return manifest, True


def _already_there(out: Path, corpus_path: Path, source: Fingerprint, spec: Mapping[str, Any],
                   overwrite: bool) -> Manifest | None:
  """The manifest in `out` if it is the one wanted; None if it may be replaced."""
  if not (out / manifest_lib.NAME).is_file():
    raise CorpusError(f"{out} is not empty and holds no index; name another folder")
  try:
    old = Manifest.load(out)
    for name, fingerprint in old.files.items():
      fingerprint.verify(out / name, "build again with --overwrite")
  except CorpusError:
    if overwrite:
      return None
    raise
  if (old.source, old.encoder, old.index) != (source, spec, {"kind": faiss_index.KIND}):
    if overwrite:
      return None
    what = "another corpus" if old.source != source else f"encoder {dict(old.encoder)}"
    raise CorpusError(f"{out} holds the index of {what}; name another folder, or replace it with "
                      "--overwrite")
  if not corpus_lib.is_packed(corpus_path):
    seen_from_out = os.path.relpath(corpus_path, out)
    if seen_from_out != old.corpus_path:  # the same corpus, moved
      old = Manifest(**{**vars(old), "corpus_path": seen_from_out})
      old.save(out)
  return old


def _fill(folder: Path, corpus_path: Path, source: Fingerprint, spec: Mapping[str, Any],
          out: Path, quiet: bool) -> Manifest:
  """Writes a whole index into `folder`, which will become `out`."""
  with Progress(TextColumn("{task.description}"), BarColumn(),
                TextColumn("{task.percentage:>3.0f}%"), TimeRemainingColumn(),
                console=Console(stderr=True), disable=quiet) as progress:
    scanning = progress.add_task("checking lines", total=source.bytes)
    text_path = corpus_lib.prepare(
        corpus_path, folder, lambda n: progress.update(scanning, completed=n))
    corpus = corpus_lib.Corpus(text_path, folder / corpus_lib.OFFSETS)
    passages = (contents for _, contents in corpus)
    encoder = encoders.encoder_class(spec["name"]).fit(
        progress.track(passages, len(corpus), description="learning idf"), spec["dim"])
    index = faiss_index.FlatIndex.empty(encoder.dim)
    encoding = progress.add_task("encoding", total=len(corpus))
    for batch in encoders.batched((contents for _, contents in corpus), ENCODE_BATCH):
      index.add(encoder.encode_passages(batch))
      progress.advance(encoding, len(batch))
  index.save(folder / faiss_index.NAME)
  names = [corpus_lib.OFFSETS, faiss_index.NAME, *encoder.save(folder)]
  packed = corpus_lib.is_packed(corpus_path)
  manifest = Manifest(
      corpus_path=corpus_lib.UNPACKED if packed else os.path.relpath(corpus_path, out),
      source=source, corpus=Fingerprint.of(text_path), rows=len(corpus), encoder=encoder.spec(),
      index={"kind": faiss_index.KIND},
      files={name: Fingerprint.of(folder / name) for name in names})
  if not packed and manifest.corpus != source:
    raise CorpusError(f"{corpus_path} changed while it was read; build again when it is at rest")
  manifest.save(folder)
  return manifest


def _put_in_place(folder: Path, out: Path) -> None:
  """Renames the folder to `out`; what was there goes only once the new one stands."""
  old = _fresh_folder(out, "old")
  if out.exists():
    out.rename(old)
  folder.rename(out)
  shutil.rmtree(old, ignore_errors=True)


def _fresh_folder(out: Path, purpose: str) -> Path:
  """An empty folder beside `out`, so that renaming it there is one step."""
  folder = out.with_name(f".{out.name}.{purpose}.{os.getpid()}")
  shutil.rmtree(folder, ignore_errors=True)
  folder.mkdir()
  return folder


if __name__ == "__main__":
  sys.exit(main())
