"""Makes gemma.json: what Hugging Face transformers (f32, greedy) answers with Gemma 3 270M out of its Q4_K_M GGUF file.

Run once by hand, with torch, transformers, accelerate and gguf installed; trtpd itself is not used:

    python tests/golden/make_gemma.py path/to/gemma-3-270m-q4_k_m.gguf > tests/golden/gemma.json

The last prompt is longer than the model's sliding window of 512 tokens. `smallest_gap` as in make_golden.py.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import transformers

MAX_TOKENS = 32
NOTES = "".join(
    f"Note {i}: Ada keeps {3 + (i * 5) % 11} boxes in the map room and counted them on day {i}.\n" for i in range(1, 33)
)
PROMPTS = {
    "sea": "The sea looks blue because",
    "story": "Once upon a time, in a village by the river, there lived an old clockmaker who",
    "code": "def fibonacci(n):\n    ",
    "chinese": "北京的历史",
    "spaces": "  a  list:\n\n\n\t- 🌧️☕ é\n",
    "notes": NOTES,
}


def main() -> None:
    path = Path(sys.argv[1])
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    entries = {}
    for name, text in PROMPTS.items():
        ids = tokenizer(text, return_tensors="pt").input_ids
        out = model.generate(
            ids,
            max_new_tokens=MAX_TOKENS,
            min_new_tokens=MAX_TOKENS,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
        tops = torch.stack(out.logits).squeeze(1).topk(2, dim=-1).values
        entries[name] = {
            "text_input": text,
            "prompt_ids": ids[0].tolist(),
            "output_ids": out.sequences[0, ids.shape[1] :].tolist(),
            "smallest_gap": round(float((tops[:, 0] - tops[:, 1]).min()), 6),
        }
        print(name, ids.shape[1], entries[name]["smallest_gap"], file=sys.stderr)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    json.dump({"model": path.name, "versions": versions, "prompts": entries}, sys.stdout, ensure_ascii=False, indent=1)
    print()


if __name__ == "__main__":
    main()
