import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan.data.tokenizer import Tokenizer
from torchtitan.generation.text import TextStream


def decode(ids):
    """A token is a byte."""
    return bytes(ids).decode("utf-8", errors="replace")


def pushed(data, stops=()):
    stream = TextStream(decode, stops)
    pieces = []
    for byte in data:
        pieces.append(stream.push(byte))
        if stream.stopped:
            return pieces
    return [*pieces, stream.finish()]


@settings(deadline=None)
@given(text=st.text(max_size=30))
def test_the_pieces_are_the_text_and_none_has_half_a_character(text):
    pieces = pushed(text.encode())
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


@settings(deadline=None)
@given(text=st.text(alphabet="abé🎈", max_size=30), stop=st.text(alphabet="abé🎈", min_size=1))
def test_the_text_ends_before_the_first_stop_string(text, stop):
    pieces = pushed(text.encode(), [stop])
    assert "".join(pieces) == text.partition(stop)[0]


def test_the_beginning_of_a_stop_string_waits_until_it_is_none():
    assert pushed(b"a\n\nUs: b", ["\n\nUser:"]) == ["a", *[""] * 4, "\n\nUs:", " ", "b", ""]
    assert pushed(b"one END two", ["END", "two"])[-1] == ""


def test_bytes_that_are_no_character_do_not_hold_the_text_for_ever():
    text = "".join(pushed([0xFF] * 20 + list(b"ok")))
    assert text == "\ufffd" * 20 + "ok"


@pytest.mark.parametrize("text", ["naïve café 🎈🎉 日本語", "  two  spaces\n\tand tabs "])
def test_with_the_bundled_tokenizer(text):
    tokenizer = Tokenizer.Config().build()
    stream = TextStream(tokenizer.decode)
    pieces = [stream.push(token) for token in tokenizer.encode(text)]
    assert "".join(pieces) + stream.finish() == text
    assert not any("\ufffd" in piece for piece in pieces)
