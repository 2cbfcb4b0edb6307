"""Known data sets: where they are looked for, and what the command prints about them."""

import json
import tarfile

import pytest

from command_line import call
from equitape.data import catalog
from equitape.data.text import SHIPPED, Document, find_files, read_documents


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("EQUITAPE_DATA", str(tmp_path / "store"))
    return tmp_path / "store"


def run(*words, code=0):
    return call("data", *words, code=code)


def test_shipped_text_is_prose_and_names_its_origin():
    train, valid = list(read_documents("shipped:train")), list(read_documents("shipped:valid"))
    assert [len(document.text) > 400_000 for document in train] == [True, True]
    assert len(valid) == 1
    assert len(valid[0].text) > 8 * 1024
    assert "Emma Woodhouse, handsome, clever, and rich" in valid[0].text
    assert not {document.text for document in train} & {document.text for document in valid}
    assert "public domain" in (SHIPPED / "LICENCE").read_text()
    assert sum(file.stat().st_size for file in SHIPPED.rglob("*") if file.is_file()) < 400 * 1024
    with pytest.raises(ValueError, match="shipped:train and shipped:valid"):
        read_documents("shipped:tests")


def test_relative_paths_are_found_under_the_data_folder(folder):
    (folder / "books/train").mkdir(parents=True)
    (folder / "books/train/a.txt").write_text("far")
    for source in ("books/train", "data/books/train"):
        assert [document.text for document in read_documents(source)] == ["far"]
    # the working directory comes first
    (folder.parent / "work/books/train").mkdir(parents=True)
    (folder.parent / "work/books/train/b.txt").write_text("near")
    assert [document.text for document in read_documents("books/train")] == ["near"]
    with pytest.raises(ValueError, match=rf"'{folder.parent}/books'"):
        find_files(folder.parent / "books")


def test_the_command_lists_what_is_there_and_what_is_missing(folder):
    rows = json.loads(run("--json").stdout)
    assert rows["austen"]["found"] == str(SHIPPED)
    assert rows["books"]["found"] is None
    assert rows["books"]["download"] == "equitape data books --download"
    assert rows["proofs"]["download"] is None
    assert "proof-pile" in rows["proofs"]["origin"]
    (folder / "scrolls").mkdir(parents=True)
    assert json.loads(run("scrolls", "--json").stdout)["scrolls"]["found"] == str(folder / "scrolls")
    shown = run("books").stdout
    assert "missing" in shown
    assert "data/books.tar.xz/books/train" in shown
    assert "Did you mean 'books'" in run("bok", code=2).output


def test_a_download_lands_where_recipes_look_for_it(folder, monkeypatch):
    def stream(hub, split):
        return (Document(f"hf:{hub}:{split}:{number}", f"{split} {number}") for number in range(100))

    monkeypatch.setattr(catalog, "_stream", stream)
    run("books", "--download")
    with tarfile.open(folder / "books.tar.xz") as archive:
        assert len(archive.getnames()) == 44
    found = [document.text for document in read_documents("data/books.tar.xz/books/valid")]
    assert found == ["validation 0", "validation 1", "validation 2"]
    assert [file.name for file in folder.iterdir()] == ["books.tar.xz"]
    again = run("books", "--download", code=1)
    assert "already exists" in again.output


def test_rows_of_one_article_become_one_document():
    rows = [" = One = \n", " text \n", " = = Part = = \n", " more \n", " = Two = \n", " end \n"]
    joined = list(catalog.join_rows(rows, catalog.CATALOG["wikitext"].heading))
    assert joined == ["".join(rows[:4]), "".join(rows[4:])]
    assert list(catalog.join_rows(rows, "")) == rows


def test_a_download_that_fails_leaves_nothing_and_says_what_to_do(folder, monkeypatch):
    def stream(hub, split):
        raise ValueError("no network")
        yield

    monkeypatch.setattr(catalog, "_stream", stream)
    failed = run("wikitext", "--download", code=1)
    assert "no network" in failed.output
    assert not list(folder.iterdir())
    by_hand = run("proofs", "--download", code=1)
    assert "proof-pile" in by_hand.output
    assert "needs the name of a data set" in run("--download", code=2).output
