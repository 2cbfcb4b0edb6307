"""SCROLLS: data in both forms, prompts, reported cuts, and scores."""

import gzip
import json
import lzma
import re
import sys
import tarfile
import zipfile

import huggingface_hub
import pytest
from small import Reader, bpe_tokenizer, contract, evaluated, our_model, write_lines

from equitape.data.scrolls import Item, load_examples, make_official_item
from equitape.data.scrolls_prompts import DATASETS, PromptWriter, kept_parts, question_of
from equitape.data.tokenizers import byte_tokenizer
from equitape.data.tokens import PieceTokenizer
from equitape.evaluation import build_evaluation, evaluate, rescore
from equitape.report.evaluation import report_folder
from equitape.tasks.scrolls_evaluation import bars_of, score_answers, spread


@pytest.fixture
def files(tmp_path):
    folder = tmp_path / "scrolls"
    write_lines(folder / "contract_nli.dev.jsonl", contract("valid", 5))
    write_lines(folder / "contract_nli.train.jsonl", contract("train", 3))
    meeting = {"task": "qmsum", "split": "val", "doc_id": "m", "document": "We met and met again. " * 30}
    meeting["items"] = [{"id": "m_0", "question": "What?", "choices": None, "answers": ["A talk.", "We met and met."]}]
    write_lines(folder / "qmsum.jsonl", [meeting])
    # other files there are no examples
    write_lines(folder / "MANIFEST.jsonl", [{"file": "x", "items": 3}])
    return folder


def test_local_files_folders_and_archives(files, tmp_path):
    found = load_examples("contract_nli", str(files))
    assert (found.split, len(found.items)) == ("valid", 10)
    assert found.items[0].answers == ("Entailment",)
    assert found.items[0].choices == ("Entailment", "Contradiction", "Not mentioned")
    assert load_examples("contract_nli", str(files / "contract_nli.dev.jsonl")).digest == found.digest
    assert load_examples("contract_nli", str(files), "train").digest != found.digest
    with tarfile.open(tmp_path / "scrolls.tar.xz", "w:xz") as archive:
        archive.add(files, "scrolls")
    for place in ("scrolls.tar.xz", "scrolls.tar.xz/scrolls"):
        assert load_examples("contract_nli", str(tmp_path / place)).digest == found.digest
    assert load_examples("qmsum", str(files)).items[0].answers == ("A talk.", "We met and met.")


def test_the_usual_places(files, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EQUITAPE_DATA", str(tmp_path))
    assert len(load_examples("contract_nli").items) == 10
    monkeypatch.delenv("EQUITAPE_DATA")
    (tmp_path / "data").mkdir()
    files.rename(tmp_path / "data/scrolls")
    assert load_examples("contract_nli").source == "data/scrolls"


def test_a_set_that_scrolls_does_not_have_is_not_looked_for_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("equitape.data.scrolls.read_official", lambda *_: pytest.fail("asked for"))
    with pytest.raises(ValueError, match=r"SCROLLS does not include it. Get it from github.com/nyu-mll/SQuALITY"):
        load_examples("squality")


def test_missing_data_says_where_it_looked(files, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("EQUITAPE_DATA", raising=False)
    with pytest.raises(
        ValueError, match=r"missing. No .jsonl files of it in data/scrolls, data/scrolls.tar.xz"
    ) as error:
        load_examples("qasper")
    for words in ("qasper.zip of the official data set 'tau/scrolls'", "data=PATH", "to download the official one"):
        assert words in str(error.value)
    with pytest.raises(
        ValueError, match=r"has no items of this set\. Give a file.*official data set is then downloaded"
    ):
        load_examples("qasper", str(files))
    with pytest.raises(ValueError, match="no split 'test', only valid, train"):
        load_examples("contract_nli", str(files), "test")
    with pytest.raises(ValueError, match=r"missing: There is no file or folder.*official data set is then downloaded"):
        load_examples("contract_nli", "nowhere")
    with pytest.raises(ValueError, match="SCROLLS has no split 'dev'"):
        load_examples("contract_nli", str(files), "dev")


def test_damaged_files(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("{]\n")
    with pytest.raises(ValueError, match=r"Line 1 of .* is not JSON"):
        load_examples("qasper", str(path))
    write_lines(path, [{"task": "qasper", "split": "valid", "document": "x", "items": [{"id": 1}]}])
    with pytest.raises(ValueError, match=r"does not have the SCROLLS format.*'question'"):
        load_examples("qasper", str(path))


@pytest.mark.parametrize("name", ["x.tar.xz", "x.tar.gz", "x.tar", "x.jsonl.gz", "x.jsonl.xz"])
@pytest.mark.parametrize("content", [b"garbage, not an archive" * 50, b"", b"half"], ids=["garbage", "empty", "half"])
def test_damaged_archives_raise_one_sentence(name, content, files, tmp_path):
    path = tmp_path / name
    if content == b"half":
        write_packed(path, files)
        content = path.read_bytes()[: path.stat().st_size // 2]
    path.write_bytes(content)
    with pytest.raises(
        ValueError, match=r"truncated or damaged.* \(.*\); download or pack it again|has no items of this set"
    ):
        load_examples("contract_nli", str(path))


def write_packed(path, files):
    """The contracts as an archive, or as one compressed file."""
    if ".tar" in path.name:
        with tarfile.open(path, f"w:{path.suffix[1:]}" if path.suffix != ".tar" else "w") as archive:
            archive.add(files, "scrolls")
    else:
        pack = {".gz": gzip.compress, ".xz": lzma.compress}[path.suffix]
        path.write_bytes(pack((files / "contract_nli.dev.jsonl").read_bytes()))


@pytest.mark.parametrize("name", ["x.tar.gz", "x.jsonl.gz", "x.jsonl.xz"])
def test_packed_files(name, files, tmp_path):
    write_packed(tmp_path / name, files)
    found = load_examples("contract_nli", str(tmp_path / name))
    assert found.digest == load_examples("contract_nli", str(files)).digest


def test_text_that_is_not_utf8(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"task": "qasper"}\n{"task": "caf\xe9"}\n')
    with pytest.raises(ValueError, match=r"Line 2 of .*a.jsonl is not UTF-8 \(byte 13\); convert"):
        load_examples("qasper", str(path))


@pytest.mark.parametrize("answers", [[], None])
def test_items_without_answers_are_refused_before_any_work(answers, tmp_path):
    rows = contract("valid", 2)
    rows[1]["items"][1]["answers"] = answers
    path = write_lines(tmp_path / "contract_nli.jsonl", rows)
    named = rows[1]["items"][1]["id"]
    with pytest.raises(ValueError, match=rf"Line 2 of .*contract_nli.jsonl: item {named!r} has no answers"):
        load_examples("contract_nli", str(path))
    # a split that is published without does not stand in the way of another
    for row in rows:
        row["split"] = "test"
    write_lines(path, [*contract("valid", 2), *rows])
    assert load_examples("contract_nli", str(path)).split == "valid"
    with pytest.raises(ValueError, match=r"Line 4 of .* has no answers"):
        load_examples("contract_nli", str(path), "test")


@pytest.mark.parametrize("answers", ["Entailment", [None], [3]])
def test_answers_that_are_no_list_of_texts(answers, tmp_path):
    rows = contract("valid", 1)
    rows[0]["items"][0]["answers"] = answers
    path = write_lines(tmp_path / "contract_nli.jsonl", rows)
    with pytest.raises(
        ValueError, match=r"does not have the SCROLLS format.*the answers of item '.*' are not a list of strings"
    ):
        load_examples("contract_nli", str(path))


def test_the_official_form(tmp_path, monkeypatch):
    """The archives that the authors publish, here from the disk."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda owner, file, repo_type: str(tmp_path / file))
    rows = [
        {"id": "1", "pid": "1_0", "input": "Who?\n\nA long text.\n\nWith parts.", "output": "He"},
        {"id": "1", "pid": "1_1", "input": "Who?\n\nA long text.\n\nWith parts.", "output": "She"},
        {"id": "2", "pid": "2_0", "input": "Why?\n\nAnother.", "output": "So"},
    ]
    with zipfile.ZipFile(tmp_path / "qasper.zip", "w") as archive:
        archive.writestr("qasper/validation.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    found = load_examples("qasper")
    assert found.split == "valid"
    assert [(item.id, item.question, item.document, item.answers) for item in found.items] == [
        ("1", "Who?", "A long text.\n\nWith parts.", ("He", "She")),
        ("2", "Why?", "Another.", ("So",)),
    ]
    assert found.source == "hf:tau/scrolls/qasper.zip"
    with pytest.raises(ValueError, match=r"is missing.*There is no item named 'qasper/test.jsonl'"):
        load_examples("qasper", split="test")


def test_official_choices_and_summaries():
    item = make_official_item(
        "quality", "1", "Why?\n\n (A) One  thing\n (B) Two\n (C) Three\n (D) Four\n\n\nText.", ["Two"]
    )
    assert (item.question, item.choices, item.document) == ("Why?", ("One thing", "Two", "Three", "Four"), "Text.")
    assert make_official_item("gov_report", "1", "Part one.\n\nPart two.", ["x"]).document == "Part one.\n\nPart two."
    assert make_official_item("contract_nli", "1", "Claim.\n\nText.", ["Entailment"]).choices[2] == "Not mentioned"


ITEM = Item(id="1", document="0123456789", question="Why?", choices=("One", "Two"), answers=("One",))


def test_prompts_of_every_set():
    assert set(DATASETS) >= {
        "qasper",
        "contract_nli",
        "narrative_qa",
        "quality",
        "qmsum",
        "summ_screen_fd",
        "gov_report",
    }
    assert question_of("qasper", ITEM) == "\n\nQuestion: Why?\n (A) One\n (B) Two\nAnswer:"
    assert question_of("contract_nli", ITEM) == "\n\nHypothesis: Why?\nConclusion:"
    assert question_of("gov_report", ITEM).startswith("\n\nQuestion: What is a summary of the preceding text?")


@pytest.mark.parametrize(
    ("rule", "kept"), [("end", "01234"), ("start", "56789"), ("middle", "01289")], ids=["end", "start", "middle"]
)
def test_only_the_document_is_cut(rule, kept):
    writer = PromptWriter("contract_nli", PieceTokenizer(byte_tokenizer()), rule)
    question = question_of("contract_nli", ITEM)
    prompt = writer.write(ITEM, 5 + len(question))
    assert bytes(prompt.tokens).decode() == kept + question
    assert (prompt.document_tokens, prompt.cut_tokens) == (10, 5)
    whole = writer.write(ITEM, 500)
    assert bytes(whole.tokens).decode() == ITEM.document + question
    assert whole.cut_tokens == 0
    with pytest.raises(ValueError, match="has no room for a document: question '1' alone needs"):
        writer.write(ITEM, 20)
    with pytest.raises(ValueError, match=r"cut is 'ends'; .*Did you mean 'end'"):
        kept_parts(10, 5, "ends")


ANSWER = r"It is ([A-Z][a-z ]+) here"


def test_answers_scores_and_what_was_cut(files, tmp_path):
    reader = Reader(ANSWER, r" \1\nand more", context=1300)
    task = build_evaluation("scrolls:contract_nli", {"data": str(files), "new_tokens": 20, "short": 64})
    report = evaluate(evaluated(reader), task, tmp_path / "out")
    # documents of 1161, 1294, 1432, 1560 and 1693 letters with a question of 37
    assert report["metrics"]["score"] == report["metrics"]["exact_match"] == 100
    assert (report["metrics"]["prompts"], report["metrics"]["prompts_cut"]) == (10, 8)
    assert {"score_cut", "score_uncut"} <= set(report["metrics"])
    assert "8 of 10 prompts were longer than 1300 tokens with their answer, and lost the end" in report["notes"][0]
    lengths = [length for _, length in reader.seen]
    assert max(lengths) == 1300 - 20
    # nothing is padded: what cannot be joined is asked apart
    assert sum(rows for rows, _ in reader.seen) == 10
    # the answer is in the beginning of every document
    blind = build_evaluation("scrolls:contract_nli", {"data": str(files), "new_tokens": 20, "cut": "start"})
    report = evaluate(evaluated(Reader(ANSWER, r" \1\nand more", context=1300)), blind, tmp_path / "blind")
    assert report["metrics"]["score"] == 20
    assert (report["metrics"]["score_uncut"], report["metrics"]["score_cut"]) == (100, 0)
    assert "lost the start" in report["notes"][0]


def test_a_real_model_with_short_context_beside(files, tmp_path):
    who = evaluated(our_model(max_position_embeddings=600))
    task = build_evaluation("scrolls:contract_nli", {"data": str(files), "samples": 4, "new_tokens": 5, "short": 32})
    report = evaluate(who, task, tmp_path / "out")
    assert report["metrics"]["prompts"] == 4
    assert report["metrics"]["prompts_cut"] == 4
    assert report["short"]["perplexity_32"] > 1
    assert (
        "Short context is judged by the perplexity of the same documents in 64 windows of 32 tokens." in report["notes"]
    )


def test_answers_that_are_stopped_are_counted(files, tmp_path):
    """Only those that neither a line nor an end token has ended."""
    long = build_evaluation("scrolls:contract_nli", {"data": str(files), "new_tokens": 8, "samples": 5})
    report = evaluate(evaluated(Reader(ANSWER, r" \1\nand more", context=1300)), long, tmp_path / "long")
    # Entailment and Contradiction have more letters, and all have with the blank before
    assert "5 of 5 answers had not ended after 8 new_tokens, and stop there." in report["notes"]
    for reply, answers in ((r"\1\nand more", 0), (r"\1", 0), (r" \1.", 0)):
        task = build_evaluation("scrolls:contract_nli", {"data": str(files), "new_tokens": 16, "samples": 5})
        out = tmp_path / str(len(reply))
        report = evaluate(evaluated(Reader(ANSWER, reply, context=1300)), task, out)
        assert sum("had not ended" in note for note in report["notes"]) == answers


def test_short_documents_still_measure_short_context(files, tmp_path):
    who = evaluated(our_model(max_position_embeddings=4000))
    task = build_evaluation("scrolls:contract_nli", {"data": str(files), "samples": 2, "new_tokens": 2, "short": 3000})
    report = evaluate(who, task, tmp_path / "out")
    assert report["short"]["perplexity_3000"] > 1
    assert any("in 2 windows of 3000 tokens or fewer, as short as they are." in note for note in report["notes"])


def test_data_may_move_but_not_change(files, tmp_path):
    def run(folder):
        task = build_evaluation("scrolls:contract_nli", {"data": str(folder), "new_tokens": 16, "samples": 2})
        return evaluate(evaluated(Reader(ANSWER, context=1300)), task, tmp_path / "out", resume=True)

    first = run(files)
    moved = tmp_path / "elsewhere"
    files.rename(moved)
    again = run(moved)
    assert again["metrics"] == first["metrics"]
    write_lines(moved / "contract_nli.dev.jsonl", contract("valid", 4))
    with pytest.raises(ValueError, match=r"already holds a different evaluation \(examples.data was"):
        run(moved)


def test_two_items_of_one_name(files):
    write_lines(files / "copy.jsonl", contract("valid", 1))
    task = build_evaluation("scrolls:contract_nli", {"data": str(files)})
    with pytest.raises(ValueError, match=r"two items are called 'valid0_0' \(Line 1 of .*; Line 1 of .*copy.jsonl\)"):
        task.prepare(evaluated(Reader(ANSWER, context=1300)))


def test_what_is_too_long_costs_the_others_nothing(tmp_path):
    """Prompts of many lengths are answered together; some are beyond a learned table."""
    write_lines(tmp_path / "a.jsonl", contract("valid", 3, words=3))
    task = build_evaluation("scrolls:contract_nli", {"data": str(tmp_path), "length": 900, "short": 32})
    who = evaluated(our_model("learned", max_position_embeddings=200))
    assert who.mixes_lengths
    report = evaluate(who, task, tmp_path / "out")
    # documents of 75, 213 and 340 letters, each with two questions and room for 16 tokens
    assert report["metrics"]["prompts"] == 2
    assert report["short"]["perplexity_32"] > 1
    assert sum("2 units failed: Position id" in note for note in report["notes"]) == 2


def test_rouge_is_scored_later_where_its_package_is(files, tmp_path, monkeypatch):
    pytest.importorskip("rouge_score")
    who = evaluated(our_model(max_position_embeddings=900), name="tape")
    options = {"data": str(files), "new_tokens": 5, "short": 32}
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "rouge_score", None)
        with pytest.raises(ValueError, match=r"needs the package rouge-score.*--no-score"):
            evaluate(who, build_evaluation("scrolls:qmsum", options), tmp_path / "out")
        assert not (tmp_path / "out").exists()
        evaluate(who, build_evaluation("scrolls:qmsum", options), tmp_path / "out", score=False)
        assert not (tmp_path / "out/report.json").exists()
        with pytest.raises(ValueError, match="needs the package rouge-score"):
            rescore(tmp_path / "out")
    report = rescore(tmp_path / "out")
    assert set(report["metrics"]) >= {"score", "rouge1", "rouge2", "rougeL", "rouge_geometric_mean"}
    assert report["bars"][1]["rows"] == ["rouge1", "rouge2", "rougeL", "rouge geometric mean"]
    report_folder(tmp_path / "out")
    assert (tmp_path / "out/bars-qmsum-rouge.png").exists()
    # answers written by hand: the better of two references counts
    path = tmp_path / "out/results.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[0]["record"]["answer"] = "we met and met"
    write_lines(path, lines)
    assert rescore(tmp_path / "out")["metrics"]["score"] == pytest.approx(100)


def test_lengths_that_leave_no_room(files):
    who = evaluated(our_model(max_position_embeddings=40))
    name, data = "scrolls:contract_nli", {"data": str(files)}
    with pytest.raises(
        ValueError, match=r"the model's context of 40 has no room for a document.*Give length=\d+ or more"
    ):
        build_evaluation(name, data).prepare(who)
    with pytest.raises(
        ValueError, match=r"Task 'scrolls': length=30 has no room for a document: the question '"
    ) as error:
        build_evaluation(name, {**data, "length": 30}).prepare(who)
    smallest = int(re.search(r"Give length=(\d+)", str(error.value)).group(1))
    units = build_evaluation(name, {**data, "length": smallest}).prepare(who)
    assert max(unit.length for unit in units if unit.key != "short") == smallest
    with pytest.raises(ValueError, match=rf"length={smallest - 1} has no room"):
        build_evaluation(name, {**data, "length": smallest - 1}).prepare(who)
    for options, message in (({"cut": "front"}, "cut is 'front'"), ({"samples": 0}, "samples is 0")):
        with pytest.raises(ValueError, match=message):
            build_evaluation("scrolls:contract_nli", options)


def test_units_do_not_depend_on_the_tokenizers_pieces(files):
    """Documents are tokenized alone, so a cut keeps whole tokens of the same document."""
    tokenizer = bpe_tokenizer()
    writer = PromptWriter("contract_nli", PieceTokenizer(tokenizer), "end")
    item = load_examples("contract_nli", str(files)).items[0]
    whole, short = writer.write(item, 10**6), writer.write(item, 100)
    assert len(short.tokens) == 100
    question = len(PieceTokenizer(tokenizer)(question_of("contract_nli", item)))
    assert short.tokens[: 100 - question] == whole.tokens[: 100 - question]
    assert short.tokens[-question:] == whole.tokens[-question:]


def test_pictures_of_scores(files, tmp_path):
    """By length of the document, models side by side; counts are whole numbers in the table."""

    def run(name, cut):
        task = build_evaluation("scrolls:contract_nli", {"data": str(files), "new_tokens": 20, "cut": "end"})
        who = evaluated(Reader(ANSWER, r" \1\nand more", sight=cut, context=1300), name=name)
        return evaluate(who, task, tmp_path / name)

    report = run("reader", 10**9)
    bars = report["bars"][0]
    # documents of 1161, 1294, 1432, 1560 and 1693 letters: all in one bin
    assert (bars["rows"], bars["values"], bars["counts"]) == (["all", "1,024 to 2,047"], [100, 100], [10, 10])
    assert bars["most"] == 100
    report_folder(tmp_path / "reader")
    page = (tmp_path / "reader/report.md").read_text()
    picture = "bars-contract-nli-score-by-length-of-the-document.png"
    assert f"reader: all 100.0 (10), 1,024 to 2,047 100.0 (10).]({picture})" in page
    assert (tmp_path / "reader" / picture).read_bytes().startswith(b"\x89PNG")
    assert "| prompts | 10 |" in page
    assert "| prompts cut | 8 |" in page
    run("blind", 50)
    alone = (tmp_path / "reader" / picture).read_bytes()
    report_folder(tmp_path / "reader", {"blind": tmp_path / "blind"})
    assert "; blind: all 0.00 (10), 1,024 to 2,047 0.00 (10)." in (tmp_path / "reader/report.md").read_text()
    assert (tmp_path / "reader" / picture).read_bytes() != alone
    # next to a report of an earlier version, which has no bars
    old = json.loads((tmp_path / "blind/report.json").read_text())
    del old["bars"]
    (tmp_path / "blind/report.json").write_text(json.dumps(old))
    report_folder(tmp_path / "reader", {"blind": tmp_path / "blind"})
    assert (tmp_path / "reader" / picture).read_bytes() == alone


def test_bins_of_lengths():
    records = [
        {"document_tokens": tokens, "answer": answer, "references": ["yes"]}
        for tokens, answer in ((5000, "yes"), (0, "yes"), (1023, "no"), (1024, "yes"), (2047, "no"), (700, "yes"))
    ]
    (bars,) = bars_of("qasper", records, score_answers("qasper", records))
    assert bars.rows == ["all", "1 to 1", "512 to 1,023", "1,024 to 2,047", "4,096 to 8,191"]
    assert bars.values == pytest.approx([400 / 6, 100, 50, 50, 100])
    assert bars.counts == [6, 1, 2, 2, 1]


def test_spread():
    assert spread(list(range(10)), 4) == [0, 2, 5, 7]
    assert spread([1, 2], 5) == spread([1, 2], None) == [1, 2]
