"""Documents from files, folders, archives, JSON lines and Hugging Face datasets, streamed in a fixed order.

A source is a path, `hf:NAME:CONFIG:SPLIT`, or the built-in `shipped:train` or `shipped:valid`. A path may continue
inside an archive: `books.tar.xz/books/test`. A relative path that does not exist is searched under $EQUITAPE_DATA.
"""

import gzip
import hashlib
import io
import json
import lzma
import os
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple

Source = str | Path
Sources = Source | Sequence[Source]

HUB_PREFIX = "hf:"
SHIPPED_PREFIX = "shipped:"
SHIPPED = Path(__file__).parent / "shipped"
"""Built-in public-domain novels; LICENCE in that folder gives their origin."""
ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.xz", ".txz", ".tar.bz2")
JSON_LINES = (".jsonl", ".jsonl.gz", ".jsonl.xz")
TEXT_FIELDS = ("text", "document")
"""Field names of the text in a JSON line or dataset row; the first one present is used."""
COMPRESSED: dict[str, Callable[[Any], IO[bytes]]] = {".gz": gzip.open, ".xz": lzma.open}  # type: ignore[dict-item]


MOST_DOCUMENT_BYTES = 2**31
"""Maximum size of a document: a small damaged or malicious file can unpack to more than fits in memory."""
DAMAGED = (OSError, EOFError, lzma.LZMAError, zlib.error)
"""Errors of reading a damaged file."""


class Document(NamedTuple):
    """A text and its origin."""

    name: str
    text: str


def list_sources(sources: Sources) -> list[str]:
    """One source or several, as a list of strings."""
    given = [sources] if isinstance(sources, (str, Path)) else list(sources)
    if not given:
        raise ValueError("No data given; give a file, a folder, an archive or hf:NAME.")
    return [str(source) for source in given]


def read_documents(sources: Sources) -> Iterator[Document]:
    """The documents of one or several sources, in order.

    A missing path or an empty folder raises at once, unreadable content when it is reached. Files of a folder are
    sorted by name, without hidden ones; members of an archive and lines of a file keep their order.
    """
    names = list_sources(sources)
    for name in names:
        if not name.startswith(HUB_PREFIX):
            find_files(name)
    return _read_all(names)


def candidate_paths(source: Source) -> list[Path]:
    """Candidate paths of a local source: its own path and, if relative, the path under $EQUITAPE_DATA.

    A leading `data/` means the data folder: `data/books` is also `$EQUITAPE_DATA/books`.
    """
    if str(source).startswith(SHIPPED_PREFIX):
        return [SHIPPED / str(source).removeprefix(SHIPPED_PREFIX)]
    path, root = Path(source).expanduser(), os.environ.get("EQUITAPE_DATA")
    if not root or path.is_absolute():
        return [path]
    return [path, Path(root).expanduser() / (path.relative_to("data") if path.is_relative_to("data") else path)]


def find_files(source: Source) -> tuple[list[Path], str]:
    """The files of a local source, and the part of its path inside an archive ("" for none)."""
    candidates = candidate_paths(source)
    for path in candidates:
        found = _find_at(path, source)
        if found is not None:
            return found
    if str(source).startswith(SHIPPED_PREFIX):
        raise ValueError(f"Cannot find {str(source)!r}; the built-in texts are shipped:train and shipped:valid.")
    raise ValueError(
        f"There is no file or folder {str(source)!r}; check the path (tried {' and '.join(map(str, candidates))} "
        f"from {Path.cwd()}), set EQUITAPE_DATA to your data folder, or run equitape data to list data sets."
    )


def _find_at(path: Path, source: Source) -> tuple[list[Path], str] | None:
    """`find_files` for one path; None if nothing exists there."""
    if path.is_dir():
        files = sorted(file for file in _walk(path) if file.is_file())
        if not files:
            raise ValueError(f"The folder {str(source)!r} has no files; put text files into it.")
        return files, ""
    if path.exists():
        return [path], ""
    for archive in path.parents:
        if archive.is_file():
            if archive.name.endswith(ARCHIVES):
                return [archive], path.relative_to(archive).as_posix()
            raise ValueError(
                f"{str(source)!r} continues inside {str(archive)!r}, which is not an archive ({', '.join(ARCHIVES)})."
            )
    return None


def _walk(folder: Path) -> Iterator[Path]:
    """All files below a folder, without hidden ones; raises ValueError if a folder is unreadable."""

    def refuse(error: OSError) -> None:
        raise ValueError(f"Cannot read the folder {error.filename!r} ({error.strerror}); check its permissions.")

    for place, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not _is_hidden((name,))]
        yield from (Path(place) / name for name in names if not _is_hidden((name,)))


def describe_sources(sources: Sources) -> str:
    """The identity of sources: path, size and modification time of every file."""
    entries: list[Any] = []
    for source in list_sources(sources):
        files, inside = ([], "") if source.startswith(HUB_PREFIX) else find_files(source)
        known = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        # a local source is identified by its files, not by how its path was written
        entries.append([inside, known] if files else source)
    return json.dumps(entries)


def short_names(sources: Sequence[str]) -> list[str]:
    """Short unique names of sources: the last part of a path, or more parts if needed; no machine-specific parts."""
    parts = [(source,) if source.startswith(HUB_PREFIX) else PurePosixPath(source).parts for source in sources]
    names = []
    for mine in parts:
        others = {other for other in parts if other != mine}
        enough = (count for count in range(1, len(mine)) if all(mine[-count:] != other[-count:] for other in others))
        names.append(str(PurePosixPath(*mine[-next(enough, len(mine)) :])))
    return names


def _read_all(names: Iterable[str]) -> Iterator[Document]:
    for name in names:
        empty = True
        for document in _read_hub(name) if name.startswith(HUB_PREFIX) else _read_local(name):
            empty = False
            yield document
        if empty:
            raise ValueError(f"{name!r} has no text; give a source with at least one non-empty document.")


def _read_local(source: str) -> Iterator[Document]:
    for name, stream in read_streams(source):
        if name.endswith(JSON_LINES):
            for number, row in read_json_lines(name, stream):
                if text := _text_of(row, f"Line {number} of {name}"):
                    yield Document(f"{name}:{number}", text)
        elif text := _decode(repr(name), _read_bytes(name, stream)):
            yield Document(name, text)


def read_streams(source: Source) -> Iterator[tuple[str, IO[bytes]]]:
    """(name, decompressed content) of every file of a local source and every member of its archives."""
    files, inside = find_files(source)
    for file in files:
        with _open(file) as stream:
            yield from _unpack(str(file), stream, inside)


def _open(file: Path) -> IO[bytes]:
    try:
        return file.open("rb")
    except OSError as error:
        raise ValueError(f"Cannot read {str(file)!r} ({error.strerror}); check its permissions.") from error


def _unpack(name: str, stream: IO[bytes], inside: str = "") -> Iterator[tuple[str, IO[bytes]]]:
    if name.endswith(ARCHIVES):
        yield from _read_archive(name, stream, inside)
        return
    for ending, decompress in COMPRESSED.items():
        if name.endswith(ending):
            stream = decompress(stream)
    yield name, stream


def _read_archive(name: str, stream: IO[bytes], inside: str) -> Iterator[tuple[str, IO[bytes]]]:
    """Members in archive order, so that it is read once, front to back."""
    found = False
    try:
        with tarfile.open(fileobj=stream, mode="r|*", tarinfo=StrictMember) as archive:
            for member in archive:
                path = PurePosixPath(member.name)
                wanted = not inside or path.is_relative_to(inside)
                if not member.isfile() or not wanted or _is_hidden(path.parts):
                    continue
                found = True
                _check_size(f"{name}/{path}", member.size)
                content = archive.extractfile(member)
                assert content is not None
                # read the full member: decompressing it may seek, which the archive cannot
                yield from _unpack(f"{name}/{path}", io.BytesIO(content.read()))
            _check_end(archive)
    except (tarfile.TarError, *DAMAGED) as error:
        raise ValueError(f"{name!r} is a truncated or damaged archive ({error}); download or pack it again.") from error
    if inside and not found:
        raise ValueError(f"The archive {name!r} has nothing under {inside!r}; list it with: tar tf {name}")


class StrictMember(tarfile.TarInfo):
    """A strict archive member. tarfile treats a damaged header or a missing end as the end of the archive."""

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> "StrictMember":
        try:
            return super().fromtarfile(archive)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            raise
        except tarfile.HeaderError as error:
            # the first header of an archive shows which compression it has
            if archive.offset == 0:
                raise
            raise tarfile.ReadError(f"damaged at byte {archive.offset:,}: {error}") from error


def _check_end(archive: tarfile.TarFile) -> None:
    """Raise an error for data after the end mark: members behind a header of zeros, or a second archive."""
    stream: Any = archive.fileobj
    while block := stream.read(tarfile.RECORDSIZE):
        if block.strip(b"\0"):
            raise tarfile.ReadError(f"more data follows its end mark at byte {archive.offset:,}")


def _check_size(name: str, size: int) -> None:
    if size > MOST_DOCUMENT_BYTES:
        raise ValueError(
            f"{name!r} unpacks to more than {MOST_DOCUMENT_BYTES / 2**30:g} GiB, the limit for one document; split it."
        )


def read_json_lines(name: str, stream: IO[bytes]) -> Iterator[tuple[int, Any]]:
    """(number, content) of every line of JSON."""
    number = 0
    while line := _read_bytes(name, stream, line=True):
        number += 1
        if not line.strip():
            continue
        where = f"Line {number} of {name}"
        try:
            row = json.loads(_decode(where, line))
        except json.JSONDecodeError as error:
            raise ValueError(f"{where} is not JSON ({error.msg}); each line must be one object.") from None
        except RecursionError:
            raise ValueError(f"{where} is nested too deeply; each line must be one object.") from None
        yield number, row


def _text_of(row: Any, where: str) -> str:
    if isinstance(row, dict):
        for field in TEXT_FIELDS:
            if isinstance(row.get(field), str):
                return row[field]
    fields = " or ".join(repr(field) for field in TEXT_FIELDS)
    raise ValueError(f"{where} has no text under {fields}; rename the field that holds it.")


def _read_bytes(name: str, stream: IO[bytes], line: bool = False) -> bytes:
    try:
        content = stream.readline(MOST_DOCUMENT_BYTES + 1) if line else stream.read(MOST_DOCUMENT_BYTES + 1)
    except DAMAGED as error:
        raise ValueError(f"{name!r} is truncated or damaged ({error}); download or pack it again.") from error
    _check_size(name, len(content))
    return content


def _decode(where: str, content: bytes) -> str:
    if b"\0" in content:
        raise ValueError(f"{where} is binary (it has NUL bytes), not text; remove it or give a narrower path.")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{where} is not UTF-8 (byte {error.start}); convert it, for example with: iconv -f latin1 -t utf-8"
        ) from None


def _is_hidden(parts: Iterable[str]) -> bool:
    return any(part.startswith(".") and part not in (".", "..") for part in parts)


def _read_hub(source: str) -> Iterator[Document]:
    """Rows of a streamed Hugging Face dataset. CONFIG and SPLIT are optional; the default split is train."""
    name, config, split, *rest = [*source.removeprefix(HUB_PREFIX).split(":"), "", ""]
    if not name or any(rest):
        raise ValueError(f"Cannot parse {source!r}; write hf:NAME, hf:NAME:CONFIG or hf:NAME:CONFIG:SPLIT.")
    try:
        from datasets import load_dataset
    except ImportError:
        raise ValueError(
            f'{source!r} needs the package datasets; install it with pip install "equitape[data]", or use local files.'
        ) from None
    try:
        rows = load_dataset(name, config or None, split=split or "train", streaming=True)
    except Exception as error:
        # the Hub, its cache and dataset files raise various errors
        raise ValueError(f"Cannot load the dataset {source!r} ({error}).") from error
    for number, row in enumerate(rows):
        text = _text_of(row, f"Row {number} of {source!r}")
        if text:
            yield Document(f"{source}:{number}", text)


def default_cache() -> Path:
    """$EQUITAPE_CACHE, or .cache/equitape in the home directory."""
    return Path(os.environ.get("EQUITAPE_CACHE") or Path.home() / ".cache" / "equitape")


def entry(cache: str | Path | None, kind: str, *parts: str) -> Path:
    """The folder of a cache entry of some kind, which depends on these parts."""
    name = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]
    return (Path(cache) if cache is not None else default_cache()) / kind / name
