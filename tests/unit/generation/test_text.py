import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, normalizers
from tokenizers.models import BPE

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


def byte_fallback():
    """As Mistral's and Llama 2's: bytes are tokens, and those in a row are decoded together or not at all."""
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b"]
    vocab = {name: number for number, name in enumerate(names)}
    tokenizer = tokenizers.Tokenizer(
        BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>")
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
    return tokenizer


@settings(deadline=None)
@given(text=st.text(alphabet="ab é日本🎈\ufffd", max_size=12))
@example("日本🎈🎈 a")
@example("\ufffd🎈\ufffd\ufffdé")  # U+FFFD itself, which is also what bytes of no character become
def test_characters_of_several_byte_tokens_in_a_row_come_whole(text):
    tokenizer = byte_fallback()
    stream = TextStream(tokenizer.decode)
    pieces = [stream.push(token) for token in tokenizer.encode(text).ids]
    assert "".join(pieces) + stream.finish() == text
    assert "".join(pieces).count("\ufffd") <= text.count("\ufffd")


def test_byte_tokens_that_are_no_character_do_not_hold_the_text_for_ever():
    tokenizer = byte_fallback()
    stream = TextStream(tokenizer.decode)
    broken, ok = tokenizer.token_to_id("<0xFF>"), tokenizer.encode("日ab").ids[1:]
    pieces = [stream.push(token) for token in [*ok[:3], *[broken] * 20, *ok[3:]]]
    assert pieces[2] == "日"
    assert "".join(pieces[:10]).count("\ufffd") >= 4
    assert "".join(pieces) + stream.finish() == "日" + "\ufffd" * 20 + "ab"
