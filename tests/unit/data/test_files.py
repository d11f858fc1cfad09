"""Which files a path means, what is wrong with one, and the formats' good cases."""

import csv
import gzip
import json
import os
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torchtitan.data import Files
from torchtitan.data.formats import opening
from torchtitan.data.formats.rows import FileOptions
from torchtitan.errors import DataError

TEXTS = [
    "one",
    "two\nlines",
    'quotes "and", commas',
    "\N{GRINNING FACE} 日本 é",
    "\\u{[]}",
    "tab\t",
]
VALUES = st.lists(
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")),
    min_size=1,
    max_size=8,
)


def write(path, texts: list[str]) -> None:
    name = path.name
    objects = [{"id": i, "text": text} for i, text in enumerate(texts)]
    if name.endswith(".parquet"):
        pq.write_table(
            pa.table({"text": texts, "id": list(range(len(texts)))}), path, row_group_size=2
        )
        return
    if ".csv" in name:
        lines = [
            ",".join(('"' + str(v).replace('"', '""') + '"') for v in row.values())
            for row in objects
        ]
        content = "\r\n".join(["id,text", *lines, ""])
    elif ".jsonl" in name:
        content = "\n".join(json.dumps(row, ensure_ascii=False) for row in objects)
    else:
        content = json.dumps(objects, ensure_ascii=False, indent=1)
    data = content.encode()
    if name.endswith(".gz"):
        data = gzip.compress(data)
    if name.endswith(".zst"):
        data = zstandard.ZstdCompressor().compress(data)
    path.write_bytes(data)


def read(path, **fields) -> list[str]:
    source = Files.Config(path=path, **fields).build()
    return [source.read(i) for i in range(len(source))]


NAMES = [
    "a.jsonl",
    "a.jsonl.gz",
    "a.jsonl.zst",
    "a.json",
    "a.json.gz",
    "a.csv",
    "a.csv.zst",
    "a.parquet",
]


@pytest.mark.parametrize("name", NAMES)
def test_every_format_gives_the_same_texts(tmp_path, name):
    write(tmp_path / name, TEXTS)
    assert read(str(tmp_path / name), cache_folder=str(tmp_path / "cache")) == TEXTS


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv"])
@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60
)
@given(texts=VALUES)
def test_any_text_survives_its_format(tmp_path, name, texts):
    write(tmp_path / name, texts)
    assert read(str(tmp_path / name)) == texts


@pytest.mark.parametrize(
    "form", ["lines", "lines_first_broken", "pretty", "array", "bom_array", "one"]
)
def test_the_forms_of_a_json_file(tmp_path, form):
    objects = [{"text": "a{\\"}, {"text": 'b"]'}]
    path = tmp_path / "a.json"
    contents = {
        "lines": "\n".join(map(json.dumps, objects)),
        "lines_first_broken": "{broken\n" + "\n".join(map(json.dumps, objects)),
        "pretty": "\n".join(json.dumps(row, indent=2) for row in objects),
        "array": json.dumps(objects),
        "bom_array": "\ufeff" + json.dumps(objects),
        "one": json.dumps(objects[0], indent=2),
    }
    path.write_text(contents[form], encoding="utf-8")
    source = Files.Config(path=str(path)).build()
    first = 1 if form == "lines_first_broken" else 0
    assert len(source) == (1 if form == "one" else 2 + first)
    assert [source.read(i) for i in range(first, len(source))] == ["a{\\", 'b"]'][: len(source)]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.txt"])
def test_a_byte_order_mark_is_no_part_of_the_first_row(tmp_path, name):
    """Spreadsheets and editors write one."""
    if name == "a.txt":
        (tmp_path / name).write_text("a", encoding="utf-8")
    else:
        write(tmp_path / name, ["a", "b"])
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + (tmp_path / name).read_bytes())
    assert read(str(tmp_path / name)) == (["a"] if name == "a.txt" else ["a", "b"])
    row = Files.Config(path=str(tmp_path / name)).build_rows().read(0)
    assert row["text"] == "a"
    assert row.keys() <= {"id", "text"}  # the mark is no part of the first column's name, either


def test_a_folder_a_glob_and_a_list(tmp_path):
    for name in ("b.jsonl", "a.txt", "sub/c.csv", "sub/deep/d.txt", "notes.md", ".hidden.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("no rows", encoding="utf-8")
    write(tmp_path / "b.jsonl", ["b1", "b2"])
    write(tmp_path / "sub/c.csv", ["c1"])
    (tmp_path / "a.txt").write_text("a1", encoding="utf-8")
    (tmp_path / "sub/deep/d.txt").write_text("d1", encoding="utf-8")
    assert read(str(tmp_path)) == ["a1", "b1", "b2", "c1", "d1"]
    assert read(f"{tmp_path}/*.*") == ["a1", "b1", "b2"]
    assert read(f"{tmp_path}/**/*.txt") == ["a1", "d1"]
    assert read([f"{tmp_path}/sub", f"{tmp_path}/a.txt"]) == ["c1", "d1", "a1"]
    source = Files.Config(path=str(tmp_path)).build()
    assert source.describe() == f"Files({tmp_path}): 4 files, 5 rows"


def test_another_field(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"body": "x"}', encoding="utf-8")
    assert read(str(tmp_path / "a.jsonl"), text_field="body") == ["x"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("missing.jsonl", "it does not exist"),
        ("nothing/*.jsonl", "nothing is there"),
        ("empty", "nothing is there"),
        ("other", r"no file of a known format is there \(1 of another\)"),
        ("other/a.docx", "the extension .docx is of no known format"),
        ("plain", r"the extension \(none\) is of no known format"),
        ("a.parquet.gz", r"the extension .parquet.gz is of no known format"),
    ],
)
def test_paths_that_cannot_be_read(tmp_path, name, reason):
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    for file in ("other/a.docx", "plain", "a.parquet.gz"):
        (tmp_path / file).write_bytes(b"x")
    config = Files.Config(path=str(tmp_path / name))
    (problem,) = config.check()
    assert problem.path == "path"
    with pytest.raises(
        DataError, match=rf"{name.replace('*', '.')}: {reason}; name a file, folder or glob with"
    ):
        config.build()


def test_a_package_that_is_missing_is_found_before_anything_is_opened(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl.zst").write_bytes(b"")
    (tmp_path / "b.parquet").write_bytes(b"")
    monkeypatch.setitem(opening.PACKAGES, ".zst", "no_such_zstandard")
    monkeypatch.setitem(opening.PACKAGES, ".parquet", "no_such_pyarrow")
    assert [problem.reason for problem in Files.Config(path=str(tmp_path)).check()] == [
        "reading .parquet needs the package 'no_such_pyarrow', which is not installed",
        "reading .zst needs the package 'no_such_zstandard', which is not installed",
    ]


@pytest.mark.parametrize("name", ["a.csv", "a.parquet"])
def test_a_column_that_is_missing(tmp_path, name):
    write(tmp_path / name, TEXTS)
    expected = rf"{name}: no column 'body'; it has \w+, \w+: set text_field to one of them"
    with pytest.raises(DataError, match=expected):
        read(str(tmp_path / name), text_field="body", cache_folder=str(tmp_path))


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
def test_damaged_compressed_files(tmp_path, name):
    write(tmp_path / name, TEXTS * 1000)
    whole = (tmp_path / name).read_bytes()
    cache = tmp_path / "cache"
    flipped = whole[: len(whole) // 2] + b"\xff" * 8 + whole[len(whole) // 2 + 8 :]
    for damaged in (whole[:-20], whole[: len(whole) // 2], b"garbage" + whole, flipped):
        (tmp_path / name).write_bytes(damaged)
        kind = "gzip" if name.endswith("gz") else "zstd"
        with pytest.raises(
            DataError, match=rf"{name}: damaged {kind} file \(.*\); restore or remove it"
        ):
            read(str(tmp_path / name), cache_folder=str(cache))
        assert [path.suffix for path in cache.iterdir() if path.suffix != ".lock"] == []


def test_several_frames_one_after_the_other(tmp_path):
    first, second = b'{"text": "a"}\n', b'{"text": "b"}\n'
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(first) + gzip.compress(second))
    frame = zstandard.ZstdCompressor().compress
    (tmp_path / "b.jsonl.zst").write_bytes(frame(first) + frame(second))
    assert read(str(tmp_path), cache_folder=str(tmp_path / "c")) == ["a", "b", "a", "b"]


def test_a_damaged_parquet_file(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1 not really PAR1")
    with pytest.raises(
        DataError, match=r"a.parquet: not a readable Parquet file \(.*\); restore or remove it"
    ):
        read(str(tmp_path / "a.parquet"), cache_folder=str(tmp_path / "c"))


def test_a_parquet_file_without_rows(tmp_path):
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "a.parquet")
    assert read(str(tmp_path / "a.parquet"), cache_folder=str(tmp_path / "c")) == []


def test_a_file_that_the_system_does_not_give_out(tmp_path):
    path = tmp_path / "a.jsonl"
    write(path, TEXTS)
    source = Files.Config(path=str(path)).build()
    path.unlink()
    expected = (
        r"a.jsonl: cannot be read \(No such file or directory\); check the file and its permissions"
    )
    with pytest.raises(DataError, match=expected):
        source.read(0)
    with pytest.raises(DataError, match=expected):
        opening.open_rows(path, FileOptions("text", None))


def test_a_long_csv_field(tmp_path):
    text = "word, " * 100_000
    with (tmp_path / "a.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([["text"], [text], ["short"]])
    assert read(str(tmp_path / "a.csv")) == [text, "short"]


def test_text_is_utf8_whatever_the_locale(tmp_path):
    for name in ("a.jsonl", "b.json", "c.csv", "d.jsonl.gz", "e.parquet"):
        write(tmp_path / name, TEXTS)
    (tmp_path / "f.txt").write_bytes("日本 é".encode())
    program = (
        "import sys; from torchtitan.data import Files, Tokenizer, Embedded\n"
        f"source = Files.Config(path={str(tmp_path)!r}, cache_folder={str(tmp_path / 'cache')!r}).build()\n"
        "tokenizer = Tokenizer.Config().build()\n"
        "texts = [source.read(i) for i in range(len(source))]\n"
        "assert [tokenizer.decode(tokenizer.encode(text)) for text in texts] == texts\n"
        "embedded = Embedded.Config().build()\n"
        "assert len([embedded.read(i) for i in range(len(embedded))]) > 10\n"
        "sys.stdout.buffer.write(''.join(texts).encode())\n"
    )
    locale = {"LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        env=os.environ | locale,
        capture_output=True,
        check=True,
    )
    assert result.stdout.decode() == "".join(TEXTS) * 5 + "日本 é"
