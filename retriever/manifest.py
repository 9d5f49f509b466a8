"""What an index was built from: digests, so that no index ever answers for another corpus."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from retriever.protocol import CorpusError

NAME = "manifest.json"
FORMAT = 2
WHOLE_BYTES = 1 << 30  # a file up to here is verified whole, a larger one by its sample
SAMPLE_BLOCKS, BLOCK_BYTES = 64, 1 << 20


@dataclasses.dataclass(frozen=True)
class Fingerprint:
  """A file's size, SHA-256, and the SHA-256 of up to 64 blocks spread evenly over it."""

  bytes: int
  sha256: str
  sample_sha256: str

  @classmethod
  def of(cls, path: Path) -> Fingerprint:
    """Reads the whole file once."""
    with _open(path) as f:
      whole = hashlib.file_digest(f, "sha256").hexdigest()
    return cls(path.stat().st_size, whole, _sample(path))

  def verify(self, path: Path, repair: str) -> None:
    """Raises CorpusError if the file is not the one fingerprinted."""
    if not path.is_file():
      raise CorpusError(f"{path} is missing; {repair}")
    size = path.stat().st_size
    if size != self.bytes:
      raise CorpusError(f"{path} has {size:,} bytes, its index was built with {self.bytes:,}; "
                        f"{repair}")
    same = (Fingerprint.of(path) == self if size <= WHOLE_BYTES
            else _sample(path) == self.sample_sha256)
    if not same:
      raise CorpusError(f"{path} is not the file its index was built with (SHA-256 differs): it "
                        f"was changed or damaged; {repair}")


@dataclasses.dataclass(frozen=True)
class Manifest:
  """One index folder: `corpus_path` (seen from the folder), `model` (the folder or hub id of the
  encoder's weights) and `source` say where it came from, everything else says what it answers with
  and makes up its `fingerprint`.

  `encoder`: None for an index of words. `files`: by their paths seen from the folder.
  """

  corpus_path: str
  source: Fingerprint  # the file given to the build, still packed if it was
  corpus: Fingerprint
  rows: int
  skipped: int  # lines of the source that were no passages
  encoder: Mapping[str, Any] | None
  index: Mapping[str, Any]
  files: Mapping[str, Fingerprint]
  model: str | None = None

  @property
  def fingerprint(self) -> str:
    """A hash over all that can change a search's result; the same wherever the files lie."""
    parts = dataclasses.asdict(self)
    del parts["corpus_path"], parts["model"], parts["source"]
    canonical = json.dumps({"format": FORMAT} | parts, sort_keys=True)
    return hashlib.sha256(canonical.encode()).hexdigest()

  def save(self, folder: Path) -> None:
    """Writes the manifest whole or not at all."""
    record = {"format": FORMAT, "fingerprint": self.fingerprint} | dataclasses.asdict(self)
    temporary = folder / f".{NAME}.{os.getpid()}"
    temporary.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    temporary.replace(folder / NAME)

  @classmethod
  def load(cls, folder: Path) -> Manifest:
    """Reads a manifest and checks it against its own fingerprint."""
    path = folder / NAME
    repair = "build the index again with --overwrite"
    try:
      record = json.loads(path.read_bytes())
      if record["format"] != FORMAT:
        raise CorpusError(f"{path} has format {record['format']!r}, this version reads "
                          f"{FORMAT}; {repair}")
      manifest = cls(
          source=Fingerprint(**record["source"]), corpus=Fingerprint(**record["corpus"]),
          files={name: Fingerprint(**f) for name, f in record["files"].items()},
          **{key: record[key] for key in ("corpus_path", "rows", "skipped", "encoder", "index",
                                          "model")})
      fingerprint = record["fingerprint"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
      raise CorpusError(f"{path} can't be read ({type(e).__name__}: {e}); {repair}") from e
    if manifest.fingerprint != fingerprint:
      raise CorpusError(f"{path} does not match its own fingerprint: it was changed or damaged; "
                        f"{repair}")
    return manifest


def _open(path: Path):
  try:
    return path.open("rb")
  except OSError as e:
    raise CorpusError(f"{path} can't be read: {e.strerror}; name a file that exists") from e


def _sample(path: Path) -> str:
  size = path.stat().st_size
  digest = hashlib.sha256()
  with _open(path) as f:
    for i in range(SAMPLE_BLOCKS):
      f.seek(max(size - BLOCK_BYTES, 0) * i // (SAMPLE_BLOCKS - 1))
      digest.update(f.read(BLOCK_BYTES))
      if size <= BLOCK_BYTES:
        break
  return digest.hexdigest()
