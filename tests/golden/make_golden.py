"""Makes golden.json: what Hugging Face transformers (f32, greedy) answers to eight prompts with SmolLM2-135M-Instruct.

Run once by hand, with torch, transformers, accelerate and gguf installed; trtpd itself is not used, so that the
reference shares none of its code:

    python tests/golden/make_golden.py path/to/SmolLM2-135M-Instruct.Q4_1.gguf > tests/golden/golden.json

Each entry also holds the smallest gap between the best and the second-best logit on its way: an f32 engine with
another order of summation agrees as long as its error stays below that.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import transformers

MAX_TOKENS = 64


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def long_notes(count: int) -> str:
    """About 1,500 tokens of plain notes with one fact to look up."""
    rooms = ["the cellar", "the reading room", "the tower", "the map room", "the courtyard"]
    keepers = ["Ada", "Bruno", "Chiara", "Dmitri", "Elif", "Farid", "Greta"]
    lines = [
        f"Note {i}: {keepers[i % 7]} keeps {3 + (i * 5) % 11} boxes in {rooms[i % 5]} and counted them on day {i}."
        for i in range(1, count + 1)
    ]
    return "\n".join(lines) + "\n\nSummarise these notes in a few sentences."


PROMPTS: dict[str, list[dict[str, str]] | str] = {
    "chat": chat("Why does the sea look blue? Explain it to a child."),
    "capital": chat("What is the capital of France?"),
    "code": chat("Write a Python function that returns the n-th Fibonacci number, with a short explanation."),
    "chinese": chat("请用中文介绍一下北京的历史。"),
    "emoji": chat("Describe this mood in two sentences: 🌧️☕📚😊"),
    "story": "Once upon a time, in a village by the river, there lived an old clockmaker who",
    "turns": [
        {"role": "system", "content": "You are a patient cook who teaches beginners."},
        {"role": "user", "content": "What do I need for a tomato soup?"},
        {
            "role": "assistant",
            "content": "Ripe tomatoes, an onion, garlic, olive oil, salt and a little basil.",
        },
        {"role": "user", "content": "Good, I have all of that. How do I begin?"},
    ],
    "long": chat(long_notes(60)),
}


def main() -> None:
    path = Path(sys.argv[1])
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    entries = {}
    for name, prompt in PROMPTS.items():
        text = (
            prompt
            if isinstance(prompt, str)
            else tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        )
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
        out = model.generate(
            ids, max_new_tokens=MAX_TOKENS, do_sample=False, return_dict_in_generate=True, output_logits=True
        )
        tops = torch.stack(out.logits).squeeze(1).topk(2, dim=-1).values
        log_probs = torch.stack(out.logits).squeeze(1).log_softmax(-1)
        output = out.sequences[0, ids.shape[1] :].tolist()
        entries[name] = {
            "messages": None if isinstance(prompt, str) else prompt,
            "text_input": text,
            "prompt_ids": ids[0].tolist(),
            "output_ids": output,
            "log_probs": [round(float(row[token]), 5) for row, token in zip(log_probs, output, strict=True)],
            "text_output": tokenizer.decode(output, skip_special_tokens=True),
            "smallest_gap": round(float((tops[:, 0] - tops[:, 1]).min()), 6),
        }
        print(name, ids.shape[1], len(output), entries[name]["smallest_gap"], file=sys.stderr)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    document = {"model": path.name, "max_tokens": MAX_TOKENS, "versions": versions, "prompts": entries}
    json.dump(document, sys.stdout, ensure_ascii=False, indent=1)
    print()


if __name__ == "__main__":
    main()
