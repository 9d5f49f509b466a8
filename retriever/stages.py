"""The stages of a build, each of which leaves a file that a later attempt finds and keeps."""

from __future__ import annotations

import dataclasses
import fcntl
import io
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.text import Text

from retriever import bm25, console, encoders, faiss_index, store
from retriever import corpus as corpus_lib
from retriever import manifest as manifest_lib
from retriever.corpus import Corpus, Scan
from retriever.manifest import Fingerprint, Manifest
from retriever.protocol import CorpusError
from retriever.vectors import Encoder, batched

ENCODE_BATCH = 4096
KEEP_ROWS = 65_536  # a kill costs at most as many, encoded again
TRAINED = faiss_index.KINDS
KINDS = ("flat", "mesh", *TRAINED, "bm25")
RECIPE, SCAN, ENCODER = ".recipe.json", ".scan.json", ".encoder.json"


@dataclasses.dataclass(frozen=True)
class Recipe:
  """What an index is made from and of; `faiss_file`: a finished one to take in."""

  corpus_path: Path
  source: Fingerprint
  encoder: Mapping[str, Any] | None
  index: Mapping[str, Any]
  skip_bad: bool = False
  faiss_file: Path | None = None

  def made(self, manifest: Manifest, out: Path) -> bool:
    """Whether the index in `out` is what this would make."""
    encoder, index = self.encoder and encoders.identity(self.encoder), dict(self.index)
    if (manifest.source, manifest.encoder) != (self.source, encoder):
      return False
    if index["kind"] in TRAINED and "factory" not in index:
      index["factory"] = faiss_index.factory(index["kind"], manifest.rows, encoder["dim"])
    if self.faiss_file and os.path.relpath(self.faiss_file, out) not in manifest.files:
      return False
    return (index.items() <= dict(manifest.index).items()
            and (self.skip_bad or not manifest.skipped))

  def to_json(self) -> str:
    return json.dumps([dataclasses.asdict(self.source), self.encoder, self.index, self.skip_bad,
                       str(self.corpus_path), str(self.faiss_file)], sort_keys=True)


class Workshop:
  """The folder `.NAME.part` beside an index that is being built; one builder at a time."""

  def __init__(self, out: Path, recipe: Recipe, quiet: bool):
    self.out, self.folder, self._recipe = out, out.with_name(f".{out.name}.part"), recipe
    self._progress = console.Bars(quiet=quiet)

  def __enter__(self) -> Workshop:
    self._lock = _locked(self.out.with_name(f".{self.out.name}.lock"))
    self._settle_old()
    self.folder.mkdir(exist_ok=True)
    recipe = self.folder / RECIPE
    if not (recipe.is_file() and recipe.read_text() == self._recipe.to_json()):
      self._sweep()  # of another build
      recipe.write_text(self._recipe.to_json())
    self._progress.start()
    return self

  def __exit__(self, *_) -> None:
    self._progress.stop()
    worth = any((self.folder / name).is_file() for name in (SCAN, manifest_lib.NAME))
    if self.folder.exists() and not worth:
      shutil.rmtree(self.folder, ignore_errors=True)
    Path(self._lock.name).unlink(missing_ok=True)
    self._lock.close()

  def fill(self) -> Manifest:
    """Goes through the stages that are left; the folder then is a whole index."""
    recipe = self._recipe
    if (self.folder / manifest_lib.NAME).is_file():  # killed before it was put in its place
      return Manifest.load(self.folder)
    scan = self._scan()
    index = dict(recipe.index)
    with Corpus(scan.path, self.folder / corpus_lib.OFFSETS) as corpus:
      if index["kind"] == "bm25":
        bars = self._progress.track(_contents(corpus), len(corpus), description="counting words")
        built = bm25.BM25.build(bars, self.folder)
        index |= built.spec()
        files = built.files
      else:
        encoder, files = self._encoder(corpus)
        files += self._take_in(len(corpus), encoder.dim) if recipe.faiss_file else (
            self._vectors(corpus, encoder, index))
    manifest = self._manifest(scan, index, files)
    manifest.save(self.folder)
    return manifest

  def put_in_place(self) -> None:
    """Renames the folder to `out`; what was there goes only once the new one stands."""
    old = self.out.with_name(f".{self.out.name}.old")
    if self.out.exists():
      if any(self.out.iterdir()) and not (self.out / manifest_lib.NAME).is_file():
        raise CorpusError(f"{self.out} is not empty any more and holds no index; the new one waits "
                          f"in {self.folder}: clear the folder and repeat the command")
      self.out.rename(old)
    self.folder.rename(self.out)
    shutil.rmtree(old, ignore_errors=True)
    for path in self.out.glob(".*"):  # what only a build in progress needs
      path.unlink()

  def _settle_old(self) -> None:
    """A build that was killed while it replaced an index leaves that one aside."""
    old = self.out.with_name(f".{self.out.name}.old")
    if old.exists() and not self.out.exists():
      old.rename(self.out)
    shutil.rmtree(old, ignore_errors=True)

  def _scan(self) -> Scan:
    """The lines checked and their offsets."""
    done = self.folder / SCAN
    if done.is_file():
      found = json.loads(done.read_text())
      return Scan(Path(found["path"]), found["rows"], found["skipped"], tuple(found["reasons"]))
    path = self._recipe.corpus_path
    bar = self._progress.add_task("checking lines, bytes", total=self._recipe.source.bytes)
    scan = corpus_lib.prepare(path, self.folder, lambda n: self._progress.update(bar, completed=n),
                              self._recipe.skip_bad)
    for reason in scan.reasons:
      self._progress.console.print(Text(f"skipped: {reason}"))
    _write(done, json.dumps(dataclasses.asdict(scan) | {"path": str(scan.path)}))
    return scan

  def _encoder(self, corpus: Corpus) -> tuple[Encoder, list[str]]:
    """The encoder, and the files of what it learned from the corpus."""
    spec, done = self._recipe.encoder, self.folder / ENCODER
    if done.is_file():
      return encoders.from_spec(spec, self.folder), json.loads(done.read_text())
    encoder = encoders.fit(spec, self._progress.track(
        _contents(corpus), len(corpus), description="learning words"))
    files = encoder.save(self.folder)
    _write(done, json.dumps(files))
    return encoder, files

  def _vectors(self, corpus: Corpus, encoder: Encoder, index: dict[str, Any]) -> list[str]:
    """Encodes what is not encoded yet, and has FAISS build on it where the kind asks for it."""
    kind = index["kind"]
    index["vectors"] = stored = "float16" if kind in TRAINED else "float32"
    with store.Writer(self.folder, encoder.dim, stored) as writer:
      bar = self._progress.add_task("encoding", total=len(corpus), completed=writer.rows)
      kept = writer.rows
      passages = (corpus[row][1] for row in range(writer.rows, len(corpus)))
      for vectors_MD in encoder.encode_stream(batched(passages, ENCODE_BATCH)):
        writer.append(vectors_MD)
        self._progress.update(bar, completed=writer.rows)
        if writer.rows - kept >= KEEP_ROWS:
          writer.keep()
          kept = writer.rows
      writer.keep()
    if kind not in TRAINED:
      return [store.file_name(stored)]
    index["file"] = faiss_index.NAME
    index["factory"] = index.get("factory") or faiss_index.factory(kind, len(corpus), encoder.dim)
    bar = self._progress.add_task("indexing", total=len(corpus))
    vectors_PD = store.open_vectors(self.folder, len(corpus), encoder.dim, stored)
    faiss_index.build(vectors_PD, index["factory"], self.folder / faiss_index.NAME,
                      lambda n: self._progress.update(bar, completed=n))
    return [store.file_name(stored), faiss_index.NAME]

  def _take_in(self, rows: int, dim: int) -> list[str]:
    """A finished index stays where it is; it must be of as many passages and numbers."""
    path = self._recipe.faiss_file
    index = faiss_index.read(path, rows, dim)
    try:
      faiss_index.FaissIndex(index, None, faiss_index.Effort()).check()
    except RuntimeError as e:
      reason = str(e).splitlines()[0]
      raise CorpusError(f"{path} does not give back its vectors, which searches score again "
                        f"({reason}); wanted Flat, IVF or HNSW, without IDMap") from e
    return [os.path.relpath(path, self.out)]

  def _manifest(self, scan: Scan, index: Mapping[str, Any], files: list[str]) -> Manifest:
    recipe, packed = self._recipe, corpus_lib.is_packed(self._recipe.corpus_path)
    bar = self._progress.add_task("fingerprints", total=len(files) + 2)
    found = {}
    for name in (corpus_lib.OFFSETS, *files):
      here = self.folder / name if (self.folder / name).is_file() else self.out / name
      found[name] = Fingerprint.of(here)
      self._progress.advance(bar)
    manifest = Manifest(
        corpus_path=(corpus_lib.UNPACKED if packed else
                     os.path.relpath(recipe.corpus_path, self.out)),
        source=recipe.source, corpus=Fingerprint.of(scan.path), rows=scan.rows,
        skipped=scan.skipped, encoder=recipe.encoder and encoders.identity(recipe.encoder),
        index=index, files=found, model=recipe.encoder and recipe.encoder.get("model"))
    self._progress.advance(bar)
    if not packed and manifest.corpus != recipe.source:
      shutil.rmtree(self.folder, ignore_errors=True)
      raise CorpusError(f"{recipe.corpus_path} changed while it was read; build again when it is "
                        "at rest")
    return manifest

  def _sweep(self) -> None:
    for path in self.folder.iterdir():
      shutil.rmtree(path) if path.is_dir() else path.unlink()


def _locked(path: Path) -> io.TextIOWrapper:
  """The lock file, held; it goes when its holder ends, which then removes it."""
  file = path.open("w")
  try:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    if not path.exists() or path.stat().st_ino != os.fstat(file.fileno()).st_ino:
      raise OSError("its holder has just removed it")
  except OSError as e:
    file.close()
    raise CorpusError(f"{path} says a build is at work already; wait for it, or stop it") from e
  return file


def _contents(corpus: Corpus):
  return (contents for _, contents in corpus)


def _write(path: Path, text: str) -> None:
  """Whole or not at all."""
  temporary = path.with_suffix(".new")
  temporary.write_text(text, encoding="utf-8")
  temporary.replace(path)
