"""Documents from every kind of source, in one order, and refusals that say what to do."""

import gzip
import io
import json
import lzma
import os
import sys
import tarfile
import types

import pytest

from equitape.data import text as reading
from equitape.data.text import Document, describe_sources, read_documents, short_names

TEXTS = {"b/two.txt": "second é 漢字\r\n", "a.txt": "first", "b/one.md": "# one\n", "c.py": "x = 1\n"}


def texts(source):
    return [document.text for document in read_documents(source)]


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "books"
    for name, text in TEXTS.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
    return root


def pack(root, path, mode):
    with tarfile.open(path, mode) as archive:
        archive.add(root, root.name)
    return path


def jsonl(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def test_a_file_is_one_document(folder):
    assert list(read_documents(folder / "a.txt")) == [Document(str(folder / "a.txt"), "first")]


def test_a_folder_is_read_in_the_order_of_names(folder):
    found = list(read_documents(str(folder)))
    expected = sorted(TEXTS)
    assert [document.name for document in found] == [str(folder / name) for name in expected]
    assert [document.text for document in found] == [TEXTS[name] for name in expected]


def test_hidden_files_and_empty_ones_are_no_documents(folder):
    (folder / ".git").mkdir()
    (folder / ".git" / "index").write_bytes(b"\0binary")
    (folder / "nothing.txt").write_text("")
    assert texts(folder) == [TEXTS[name] for name in sorted(TEXTS)]


@pytest.mark.parametrize(("ending", "mode"), [("tar", "w"), ("tar.gz", "w:gz"), ("tar.xz", "w:xz"), ("tgz", "w:gz")])
def test_an_archive_holds_what_its_folder_holds(folder, tmp_path, ending, mode):
    archive = pack(folder, tmp_path / f"all.{ending}", mode)
    assert sorted(texts(archive)) == sorted(TEXTS.values())


def test_a_path_may_go_on_inside_an_archive(folder, tmp_path):
    archive = pack(folder, tmp_path / "all.tar.xz", "w:xz")
    inside = list(read_documents(archive / "books" / "b"))
    assert {document.text for document in inside} == {TEXTS["b/one.md"], TEXTS["b/two.txt"]}
    assert inside[0].name.startswith(f"{archive}/books/b/")
    assert texts(archive / "books" / "a.txt") == ["first"]
    # a name that merely begins alike is another one
    with pytest.raises(ValueError, match=r"has nothing under 'boo'; list it with: tar tf"):
        texts(archive / "boo")


@pytest.mark.parametrize(("ending", "pack_bytes"), [("", bytes), (".gz", gzip.compress), (".xz", lzma.compress)])
def test_json_lines_hold_text_or_document(tmp_path, ending, pack_bytes):
    path = tmp_path / f"rows.jsonl{ending}"
    rows = [{"text": "one\n"}, {"document": "two", "items": []}, {"text": ""}, {"id": 3, "text": "three"}]
    path.write_bytes(pack_bytes(jsonl(rows) + b"\n"))
    assert texts(path) == ["one\n", "two", "three"]
    assert [document.name for document in read_documents(path)] == [f"{path}:{line}" for line in (1, 2, 4)]


def test_compressed_text_and_json_lines_inside_an_archive(tmp_path):
    root = tmp_path / "in"
    root.mkdir()
    (root / "one.jsonl.gz").write_bytes(gzip.compress(jsonl([{"text": "a"}, {"text": "b"}])))
    (root / "two.txt.xz").write_bytes(lzma.compress(b"c"))
    archive = pack(root, tmp_path / "in.tar.gz", "w:gz")
    assert sorted(texts(archive)) == sorted(texts(root)) == ["a", "b", "c"]


def test_several_sources_come_one_after_another(folder):
    assert texts([folder / "c.py", str(folder / "a.txt")]) == [TEXTS["c.py"], "first"]


def test_a_byte_order_mark_is_not_text(tmp_path):
    (tmp_path / "marked.txt").write_bytes(b"\xef\xbb\xbftext")
    assert texts(tmp_path) == ["text"]


def test_reading_holds_one_document_at_a_time(tmp_path):
    """The second line is never reached unless it is asked for."""
    path = tmp_path / "rows.jsonl"
    path.write_bytes(jsonl([{"text": "good"}]) + b"not json\n")
    found = read_documents(path)
    assert next(found).text == "good"
    with pytest.raises(ValueError, match=r"Line 2 of .* is not JSON .*each line must be one object"):
        next(found)


def test_what_cannot_be_found_is_refused_at_once(tmp_path):
    with pytest.raises(ValueError, match=r"There is no file or folder .*lost.*check the path"):
        read_documents(tmp_path / "lost")
    with pytest.raises(ValueError, match=r"The folder .* has no files; put text files into it"):
        read_documents(tmp_path)
    (tmp_path / "plain.txt").write_text("x")
    with pytest.raises(ValueError, match=r"continues inside .*plain.txt', which is not an archive"):
        read_documents(tmp_path / "plain.txt" / "inner")
    with pytest.raises(ValueError, match=r"No data given"):
        read_documents([])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("image.png", b"\x89PNG\0\0", "is binary .*NUL bytes.*narrower path"),
        ("old.txt", "café".encode("latin1"), r"is not UTF-8 \(byte 3\); convert it"),
        ("empty.txt", b"", "has no text"),
        ("rows.jsonl", jsonl([{"body": "x"}]), "Line 1 .* has no text under 'text' or 'document'; rename"),
        ("rows.jsonl", jsonl([["x"]]), "Line 1 .* has no text"),
        ("cut.tar.xz", b"nothing of the kind", "truncated or damaged archive .*download or pack it again"),
        ("cut.jsonl.gz", gzip.compress(jsonl([{"text": "x" * 999}]))[:-9], "is truncated or damaged"),
        ("cut.txt.xz", lzma.compress(b"x" * 999)[:-9], "is truncated or damaged"),
    ],
    ids=["binary", "latin1", "empty", "field", "list", "archive", "gzip", "xz"],
)
def test_what_is_not_text_is_refused(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        list(read_documents(tmp_path / name))


def test_a_cut_archive_is_refused(folder, tmp_path):
    (folder / "big.txt").write_bytes(os.urandom(60000).hex().encode())
    archive = pack(folder, tmp_path / "all.tar.gz", "w:gz")
    archive.write_bytes(archive.read_bytes()[:-30000])
    with pytest.raises(ValueError, match=r"is a truncated or damaged archive"):
        texts(archive)


@pytest.mark.skipif(os.geteuid() == 0, reason="the administrator may read everything")
def test_a_file_without_permission_is_refused(folder):
    (folder / "a.txt").chmod(0)
    with pytest.raises(ValueError, match=r"Cannot read .*check its permissions"):
        texts(folder / "a.txt")


@pytest.mark.parametrize("closed", ["", "b"])
def test_a_folder_without_permission_is_refused(folder, closed, monkeypatch):
    """Neither called empty nor skipped silently; root can read everything, so the error is simulated."""
    scan = os.scandir

    def refuse(path):
        if os.fspath(path) == os.fspath(folder / closed):
            raise PermissionError(13, "Permission denied", os.fspath(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(ValueError, match=r"Cannot read the folder .* \(Permission denied\); check its permissions"):
        read_documents(folder)


def test_a_hidden_folder_without_permission_is_left_out(folder, monkeypatch):
    (folder / ".git").mkdir()
    scan = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: pytest.fail("opened") if ".git" in str(path) else scan(path))
    assert texts(folder) == [TEXTS[name] for name in sorted(TEXTS)]


def test_the_description_of_sources_follows_their_files(folder, monkeypatch):
    before = describe_sources(folder)
    monkeypatch.chdir(folder.parent)
    assert describe_sources("books") == before
    (folder / "a.txt").write_text("longer text")
    assert describe_sources(folder) != before


class FakeDatasets(types.ModuleType):
    """Stands in for the package, and remembers what it was asked for."""

    def __init__(self):
        super().__init__("datasets")
        self.asked = None

    def load_dataset(self, name, config, split, streaming):
        self.asked = (name, config, split, streaming)
        if name == "lost":
            raise FileNotFoundError("no such dataset")
        return iter([{"text": "one"}, {"text": ""}, {"text": "two"}])


def test_hugging_face_datasets_are_streamed(monkeypatch):
    fake = FakeDatasets()
    monkeypatch.setitem(sys.modules, "datasets", fake)
    assert texts("hf:owner/name") == ["one", "two"]
    assert fake.asked == ("owner/name", None, "train", True)
    texts("hf:owner/name:en:validation")
    assert fake.asked == ("owner/name", "en", "validation", True)
    texts("hf:owner/name::test")
    assert fake.asked == ("owner/name", None, "test", True)
    with pytest.raises(ValueError, match=r"Cannot load the dataset .* \(no such dataset\)"):
        texts("hf:lost")
    for wrong in ("hf:", "hf:a:b:c:d"):
        with pytest.raises(ValueError, match=r"write hf:NAME"):
            texts(wrong)


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r'pip install "equitape\[data\]"'):
        texts("hf:owner/name")


def test_the_real_package_reads_a_local_dataset(tmp_path):
    pytest.importorskip("datasets")
    (tmp_path / "train.jsonl").write_bytes(jsonl([{"text": "one"}, {"text": "two"}]))
    assert texts(f"hf:{tmp_path}") == ["one", "two"]


def test_a_tar_stream_is_read_from_front_to_back(tmp_path):
    """Members come in the archive's order, which need not be that of names."""
    path = tmp_path / "order.tar"
    with tarfile.open(path, "w") as archive:
        for name in ("z.txt", "a.txt"):
            member = tarfile.TarInfo(name)
            member.size = 5
            archive.addfile(member, io.BytesIO(name.encode()))
    assert texts(path) == ["z.txt", "a.txt"]


def test_short_names_distinguish_sources():
    assert short_names(["/home/me/a.txt", "hf:wiki:raw:train"]) == ["a.txt", "hf:wiki:raw:train"]
    assert short_names(["x/books.tar.xz/books/train", "x/proofs.tar.xz/proofs/train"]) == [
        "books/train",
        "proofs/train",
    ]
    assert short_names(["/home/me/a.txt", "/home/me/a.txt"]) == ["a.txt", "a.txt"]


def make_tar(path, names=("a", "b", "c", "d")):
    with tarfile.open(path, "w") as archive:
        for name in names:
            content = f"{name} text".encode()
            member = tarfile.TarInfo(f"{name}.txt")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path.read_bytes()


@pytest.mark.parametrize("how", ["flipped", "zeroed", "cut", "joined", "cut inside a header"])
def test_a_damaged_archive_loses_nothing_silently(tmp_path, how):
    """tarfile takes a damaged header, zeros and a missing end for the end of the archive."""
    path = tmp_path / "books.tar"
    content = bytearray(make_tar(path))
    header = 2 * 1024
    if how == "flipped":
        content[header + 3] ^= 1
    elif how == "zeroed":
        content[header : header + 512] = bytes(512)
    elif how == "cut":
        del content[header:]
    elif how == "joined":
        content += bytes(content)
    else:
        del content[header + 100 :]
    for name in ("books.tar", "books.tar.gz"):
        (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
        with pytest.raises(ValueError, match=r"is a truncated or damaged archive .* download or pack it again"):
            list(read_documents(tmp_path / name))
    make_tar(path)
    assert len(list(read_documents(path))) == 4


def test_corrupt_compression_and_deep_nesting(tmp_path):
    packed = bytearray(gzip.compress(b"some text to pack" * 100))
    packed[20] ^= 255
    (tmp_path / "a.txt.gz").write_bytes(packed)
    with pytest.raises(ValueError, match="is truncated or damaged"):
        list(read_documents(tmp_path / "a.txt.gz"))
    (tmp_path / "deep.jsonl").write_text("[" * 200_000 + "\n")
    with pytest.raises(ValueError, match=r"Line 1 of .* is nested too deeply"):
        list(read_documents(tmp_path / "deep.jsonl"))


def test_a_document_has_a_largest_size(tmp_path, monkeypatch):
    """A compression bomb ends in a sentence, not in all the memory."""
    monkeypatch.setattr(reading, "MOST_DOCUMENT_BYTES", 1000)
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"x" * 1001))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "' + b"x" * 1001 + b'"}'))
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        member = tarfile.TarInfo("a.txt")
        member.size = 1001
        archive.addfile(member, io.BytesIO(b"x" * 1001))
    for name in ("a.txt.gz", "a.jsonl.gz", "a.tar"):
        with pytest.raises(ValueError, match=r"unpacks to more than .* GiB, the limit for one document; split it"):
            list(read_documents(tmp_path / name))
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"x" * 1000))
    assert len(list(read_documents(tmp_path / "b.txt.gz"))) == 1
