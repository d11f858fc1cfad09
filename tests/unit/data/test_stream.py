import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.data.helpers import TOKENIZER, Texts
from torchtitan.batch import IGNORE_INDEX
from torchtitan.data import tokenizer
from torchtitan.data.bad_rows import BadRowPolicy
from torchtitan.data.feed import MapFeed
from torchtitan.data.stream import Stream, new_state
from torchtitan.errors import DataError

TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30)


def stream_of(
    *sources: list[str], seq_len: int, weights: list[float] | None = None, state=None
) -> Stream:
    return Stream(
        number=0,
        n_streams=1,
        feeds=[MapFeed(Texts(Texts.Config(texts=texts)), 1, None) for texts in sources],
        weights=weights or [1.0] * len(sources),
        tokenizer=TOKENIZER,
        seq_len=seq_len,
        policy=BadRowPolicy(),
        on_bad_row=lambda row: None,
        state=state or new_state(len(sources)),
    )


def tokens_of(text: str) -> list[int]:
    return [TOKENIZER.bos_id, *TOKENIZER.encode(text), TOKENIZER.eos_id]


@given(texts=st.lists(TEXT, min_size=1, max_size=6), seq_len=st.integers(1, 40))
def test_packing(texts, seq_len):
    if not any(text.strip() for text in texts):
        texts.append("text")
    rows = [
        row
        for stream in [stream_of(texts, seq_len=seq_len)]
        for row in (stream.next_row() for _ in range(6))
    ]
    stream_tokens, stream_labels = [], []
    n = len(texts)
    for epoch in range(6 * seq_len):  # more than enough, cut below
        for i in range(n):
            if texts[(i + epoch) % n].strip():
                document = tokens_of(texts[(i + epoch) % n])
                stream_tokens += document
                stream_labels += [*document[1:], IGNORE_INDEX]
        if len(stream_tokens) >= 6 * seq_len:
            break
    assert np.concatenate([row[0] for row in rows]).tolist() == stream_tokens[: 6 * seq_len]
    assert np.concatenate([row[1] for row in rows]).tolist() == stream_labels[: 6 * seq_len]
    for tokens, _, positions, ids in rows:
        assert ids[0] == 0
        for i in range(1, seq_len):
            new = tokens[i] == TOKENIZER.bos_id
            assert ids[i] == ids[i - 1] + new
            assert positions[i] == (0 if new else positions[i - 1] + 1)
        assert positions[0] == 0


def test_a_document_longer_than_a_row_goes_on_in_the_next():
    stream = stream_of(["one two three four five six seven eight nine ten"], seq_len=4)
    document = tokens_of("one two three four five six seven eight nine ten")
    first, second = stream.next_row(), stream.next_row()
    assert first[0].tolist() == document[:4]
    assert first[1].tolist() == document[1:5]  # the last label is the first token of the next row
    assert second[0].tolist() == document[4:8]
    assert second[2].tolist() == [0, 1, 2, 3]


@given(
    texts=st.lists(TEXT, min_size=1, max_size=6), seq_len=st.integers(1, 20), stop=st.integers(0, 8)
)
def test_going_on_from_a_state_is_as_if_it_never_stopped(texts, seq_len, stop):
    sources = (["x", *texts], ["some other text"])
    straight = stream_of(*sources, seq_len=seq_len)
    rows = [straight.next_row() for _ in range(stop + 4)]
    stopped = stream_of(*sources, seq_len=seq_len)
    for _ in range(stop):
        stopped.next_row()
    resumed = stream_of(*sources, seq_len=seq_len, state=stopped.state())
    assert all(np.array_equal(resumed.next_row(), row) for row in rows[stop:])
    assert resumed.state() == straight.state()


def test_weights_are_shares_of_the_tokens():
    short, long = ["a b"] * 50, ["a b c d e f g h i j k l m n o p"] * 50
    stream = stream_of(short, long, seq_len=64, weights=[3.0, 1.0])
    for _ in range(200):
        stream.next_row()
    tokens = stream.state()["tokens"]
    assert tokens[0] / sum(tokens) == pytest.approx(0.75, abs=0.01)


def test_empty_texts_are_counted_and_not_packed():
    stream = stream_of(["", " \n", "text"], seq_len=2 * len(tokens_of("text")))
    assert stream.next_row()[0].tolist() == tokens_of("text") * 2
    assert stream.state()["counts"] == {"empty": 3, "documents": 2}


def test_a_source_without_text_ends_in_an_error_not_a_hang():
    with pytest.raises(
        DataError, match=r"10000 rows one after the other hold no text \(\{'empty': 10000\}"
    ):
        stream_of(["", " "], seq_len=4).next_row()


def test_a_document_of_several_slices(monkeypatch):
    text = "".join(f"Line {i} of the text.\n" for i in range(40))
    whole = tokens_of(text)
    monkeypatch.setattr(tokenizer, "_SLICE_CHARACTERS", 50)
    stream = stream_of([text], seq_len=7)
    rows, states = [], []
    for _ in range(len(whole) // 7):
        states.append(stream.state())
        rows.append(stream.next_row())
    n = len(whole) // 7 * 7
    assert np.concatenate([row[0] for row in rows]).tolist() == whole[:n]
    assert np.concatenate([row[1] for row in rows]).tolist() == [*whole[1:], IGNORE_INDEX][:n]
    assert max(state["open"][1] for state in states if state["open"]) > 10
    for state, row in zip(states, rows, strict=True):
        assert np.array_equal(stream_of([text], seq_len=7, state=state).next_row(), row)
