"""Run by vLLM's own Python: greedy continuations and an answer in a chat of a model, as JSON.

usage: python vllm_worker.py REQUEST ANSWER

REQUEST: {"model": folder, "prompts": [[id, ...], ...], "chat": [message, ...], "max_tokens": n}
ANSWER: {"prompts": [[id, ...], ...], "chat": {"prompt": [id, ...], "ids": [id, ...], "text": ..., "finish_reason": ...}}
"""

import json
import sys
from pathlib import Path

from vllm import LLM, SamplingParams  # in its own environment


def main(request_path: str, answer_path: str) -> None:
    request = json.loads(Path(request_path).read_text(encoding="utf-8"))
    llm = LLM(
        model=request["model"], dtype="float32", enforce_eager=True, max_model_len=512, seed=0
    )
    greedy = SamplingParams(temperature=0, max_tokens=request["max_tokens"])
    prompts = [{"prompt_token_ids": ids} for ids in request["prompts"]]
    found = [list(one.outputs[0].token_ids) for one in llm.generate(prompts, greedy)]
    (chat,) = llm.chat([request["chat"]], greedy)
    (reply,) = chat.outputs
    answer = {
        "prompts": found,
        "chat": {
            "prompt": list(chat.prompt_token_ids),
            "ids": list(reply.token_ids),
            "text": reply.text,
            "finish_reason": reply.finish_reason,
        },
    }
    Path(answer_path).write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
