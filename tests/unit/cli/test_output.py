"""What commands write, on terminals of any encoding."""

import io
import sys

import pytest

from torchtitan.cli.output import complain, say, trickle


@pytest.mark.parametrize(
    ("encoding", "written"),
    [
        ("utf-8", "a \U0001f388é\n日\n".encode()),
        ("latin-1", b"a \\U0001f388\xe9\n\\u65e5\n"),
        ("ascii", b"a \\U0001f388\\xe9\n\\u65e5\n"),
    ],
)
def test_no_text_ends_a_command(encoding, written, monkeypatch):
    """A model may write any character, and the terminal may be one of `LC_ALL=C`."""
    for name, write in (("stdout", say), ("stderr", complain)):
        raw = io.BytesIO()
        stream = io.TextIOWrapper(raw, encoding=encoding, newline="")
        with monkeypatch.context() as patch:
            patch.setattr(sys, name, stream)
            if name == "stdout":
                trickle("a \U0001f388")
                assert (
                    raw.getvalue() == written.partition("é".encode(encoding, "backslashreplace"))[0]
                )
                say("é")
            else:
                complain("a \U0001f388é")
            write("日\n\n")
        assert raw.getvalue() == written
