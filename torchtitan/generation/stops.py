"""Tokens after which nothing comes."""

from torchtitan.data.chat.template import end_of_turn_id
from torchtitan.data.tokenizer import Tokenizer

END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|end_of_turn|>", "<|eom_id|>")
"""Tokens that end an answer, whatever else a template or folder names."""


def stop_ids(tokenizer: Tokenizer) -> set[int]:
    """The end of a document, and of a turn."""
    ends = {tokenizer.vocab[name] for name in END_OF_TURN if name in tokenizer.vocab}
    turn_end = end_of_turn_id(tokenizer)
    return {tokenizer.eos_id, *ends} | ({turn_end} if turn_end is not None else set())
