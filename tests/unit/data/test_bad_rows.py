"""Every kind of bad row in every format, and the policy for them."""

import gzip
import json
from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from tests.unit.data.helpers import build, run_on
from torchtitan.data import Files, Loader
from torchtitan.data.bad_rows import BadRowPolicy, bad_kinds
from torchtitan.data.source import BadRow, text_of
from torchtitan.errors import DataError

GOOD = json.dumps({"text": "good"}).encode()
LINES = [  # (line, kind or text, words of the reason)
    (b'{"text": "brok', "broken", "broken JSON: Unterminated string starting at at character 10"),
    (b"[1, 2]", "broken", "not a JSON object but a list"),
    (b"not json", "broken", "broken JSON: Expecting value at character 1"),
    (b"[" * 100_000, "broken", "broken JSON: "),
    (b'{"text": ' + b"9" * 5000 + b"}", "broken", "broken JSON: Exceeds the limit"),
    (b'{"text": null}', "null", "the text is null"),
    (b'{"text": 3}', "not_text", "the text is of type int, not a string"),
    (b'{"text": ["a"]}', "not_text", "the text is of type list, not a string"),
    (b'{"body": "a", "id": 1}', "missing_field", "no field 'text' among ['body', 'id']"),
    (b'{"text": "\xff\xfe"}', "invalid_utf8", "byte 10 of the row is not UTF-8"),
    (b'{"text": "caf\xe9"}', "invalid_utf8", "byte 13 of the row is not UTF-8"),
    (b'{"text": "\\ud800"}', "invalid_utf8", "the text has a lone surrogate at character 0"),
]
GOOD_LINES = [
    (b'\xef\xbb\xbf{"text": "bom"}', "bom"),
    (b'{"text": "crlf"}\r', "crlf"),
    (b'{"text": ""}', ""),
    (b'{"text": "\\ud83d\\ude00"}', "\N{GRINNING FACE}"),
    ('{"text": "日本\u2028語\x85"}'.encode(), "日本\u2028語\x85"),
    (b'{"text": "a", "text": "b"}', "b"),
    (b'  {"text": "spaces"}  ', "spaces"),
]


def source(path, content: bytes, cache):
    path.write_bytes(content)
    return Files.Config(path=str(path), cache_folder=str(cache)).build()


def compress(name: str, content: bytes) -> bytes:
    if name.endswith(".gz"):
        return gzip.compress(content)
    if name.endswith(".zst"):
        return zstandard.ZstdCompressor().compress(content)
    return content


def bad_row(rows, index: int) -> BadRow:
    with pytest.raises(BadRow) as caught:
        rows.read(index)
    return caught.value


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz", "rows.jsonl.zst", "rows.json"])
@pytest.mark.parametrize(("line", "kind", "reason"), LINES, ids=range(len(LINES)))
def test_bad_lines(tmp_path, name, line, kind, reason):
    rows = source(
        tmp_path / name, compress(name, b"\n".join([GOOD, b"", line, b" ", GOOD])), tmp_path
    )
    assert len(rows) == 3
    assert rows.read(0) == rows.read(2) == "good"
    row = bad_row(rows, 1)
    assert row.kind == kind
    assert str(row).startswith(f"{tmp_path / name} line 3: {reason}")


@pytest.mark.parametrize(("line", "text"), GOOD_LINES, ids=range(len(GOOD_LINES)))
def test_good_lines(tmp_path, line, text):
    rows = source(
        tmp_path / "rows.jsonl", b"\n".join([line, GOOD, b"", b"\t \r", GOOD + b"\n"]), tmp_path
    )
    assert [rows.read(i) for i in range(len(rows))] == [text, "good", "good"]


def test_a_line_of_ten_megabytes_is_an_ordinary_document(tmp_path):
    text = "a long line " * (10_000_000 // 12)
    content = b"\n".join([GOOD, json.dumps({"text": text}).encode(), GOOD])
    rows = source(tmp_path / "rows.jsonl", content, tmp_path)
    assert [rows.read(0), rows.read(2)] == ["good", "good"]
    assert rows.read(1) == text
    config = Loader.Config(sources=[Files.Config(path=str(tmp_path / "rows.jsonl"))], n_workers=0)
    loader = build(config, rows=2, seq_len=512)
    for _ in range(3):
        counts = loader.next().counts
    assert counts["documents"] >= 2


@pytest.mark.parametrize("element", ['{"text": "brok}', '{"text": nul}', "3", "null", '["a"]'])
def test_bad_elements_of_a_json_array(tmp_path, element):
    content = f'[\n {{"text": "a"}},\n\n {element}'.encode()
    rows = source(tmp_path / "rows.json", content, tmp_path)
    assert rows.read(0) == "a"
    assert len(rows) == 2
    row = bad_row(rows, 1)
    assert row.kind == "broken"
    assert f"{tmp_path / 'rows.json'} line 4: " in str(row)


def test_bad_csv_records(tmp_path):
    content = b'id,text\n1,good\n2\n3,caf\xe9\n4,"a\nb, ""c"""\n\n5,\n6,"open"x\n7,good\n8,"never closed\n9,x\n'
    rows = source(tmp_path / "rows.csv", content, tmp_path)
    found = []
    for i in range(len(rows)):
        try:
            found.append(rows.read(i))
        except BadRow as row:
            found.append((row.kind, str(row).partition(" line ")[2]))
    assert found == [
        "good",
        ("missing_field", "3: 1 fields, too few for the column 'text'"),
        ("invalid_utf8", "4: byte 5 of the row is not UTF-8"),
        'a\nb, "c"',
        "",
        ("broken", "9: broken CSV: ',' expected after '\"'"),
        "good",
        ("broken", "11: broken CSV: unexpected end of data"),
    ]


def test_bad_parquet_values(tmp_path):
    bytes_as_text = pa.Array.from_buffers(
        pa.string(),
        3,
        [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0\3\0\0\0"), pa.py_buffer(b"a\xffb")],
    )
    pq.write_table(pa.table({"text": bytes_as_text}), tmp_path / "utf8.parquet")
    pq.write_table(pa.table({"text": pa.array(["a", None, ""])}), tmp_path / "null.parquet")
    pq.write_table(pa.table({"text": pa.array([1, 2])}), tmp_path / "int.parquet")

    def open_file(name):
        return Files.Config(path=str(tmp_path / name), cache_folder=str(tmp_path)).build()

    utf8, null, numbers = (open_file(f"{name}.parquet") for name in ("utf8", "null", "int"))
    assert [utf8.read(0), utf8.read(2), null.read(0), null.read(2)] == ["a", "b", "a", ""]
    assert (
        str(bad_row(utf8, 1)) == f"{tmp_path}/utf8.parquet row 2: byte 0 of the text is not UTF-8"
    )
    assert str(bad_row(null, 1)) == f"{tmp_path}/null.parquet row 2: the text is null"
    assert bad_row(numbers, 0).kind == "not_text"


def test_a_text_file_that_is_not_utf8(tmp_path):
    rows = source(tmp_path / "latin.txt", "café".encode("latin-1"), tmp_path)
    assert str(bad_row(rows, 0)) == f"{tmp_path}/latin.txt: byte 3 is not UTF-8"
    rows = source(tmp_path / "bom.txt", b"\xef\xbb\xbfa\r\nb", tmp_path)
    assert rows.read(0) == "a\r\nb"


def test_text_of_is_what_it_was_given():
    assert text_of("日本", "here") == "日本"


def test_the_error_policy_names_the_row_and_the_way_out():
    policy = BadRowPolicy("error")
    with pytest.raises(
        DataError,
        match=r"^bad row: a.jsonl line 2: the text is null; mend the row, or set bad_rows=skip",
    ):
        policy.meet(BadRow("null", "a.jsonl line 2", "the text is null"), Counter())


def test_the_fraction_is_judged_from_the_tenth_bad_row_on():
    policy = BadRowPolicy("skip", 0.1)
    policy.judge(Counter(documents=1, bad_null=9))
    policy.judge(Counter(documents=80, empty=10, bad_null=6, bad_broken=4))
    expected = r"^10 of 99 rows read are bad \(broken 4, null 6\), which is more than max_bad_fraction=0.1; mend"
    with pytest.raises(DataError, match=expected):
        policy.judge(Counter(documents=80, empty=9, bad_null=6, bad_broken=4))
    assert bad_kinds(Counter(documents=3)) == "none"


@pytest.mark.parametrize("workers", [0, 2])
def test_too_many_bad_rows_later_on_stop_the_run(tmp_path, workers):
    good = [json.dumps({"text": "some words of text " * 4})] * 100
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(good + ["{"] * 30), encoding="utf-8")
    config = Loader.Config(sources=[Files.Config(path=str(path))], n_workers=workers, shuffle=False)
    loader = build(config, rows=4)
    with pytest.raises(
        DataError, match=r"^\d\d of \d+ rows read are bad \(broken \d\d\), which is more than max"
    ):
        run_on(loader)
