"""Makes <family>.json here: what Hugging Face transformers (f32, eager attention, greedy) computes with the tiny
checkpoints of trtpd_testing/families.py.

Run by hand, with torch and transformers installed; trtpd itself is not used, so that the reference shares none of its
code:

    python tests/golden/families/make_families.py

Logits are those after the last token of each prompt, and for the longer ones also after token 50. `smallest_gap` is
the least distance between the best and the second-best logit on the way of an answer: an f32 engine with another order
of summation agrees as long as its error stays below that.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "support"))

from trtpd_testing.families import CONFIGS, PROMPT_TOKENS, prompt, weight  # noqa: E402

MAX_TOKENS = 16
MIDDLE = 50


def load(family: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIGS[family]))
        config = transformers.AutoConfig.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    assert type(model).__name__ == CONFIGS[family]["architectures"][0]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(weight(family, name, tuple(parameter.shape))))
    return model.eval()


def answer(model: Any, ids: list[int]) -> tuple[list[int], float]:
    """Greedy tokens, the whole sequence computed anew for each, and the smallest gap."""
    output: list[int] = []
    smallest = float("inf")
    for _ in range(MAX_TOKENS):
        logits = model(torch.tensor([ids + output]), use_cache=False).logits[0, -1]
        best, second = logits.topk(2).values.tolist()
        smallest = min(smallest, best - second)
        output.append(int(logits.argmax()))
    return output, smallest


def golden(family: str) -> dict[str, Any]:
    model = load(family)
    prompts = []
    for tokens in PROMPT_TOKENS:
        ids = prompt(family, tokens)
        rows = model(torch.tensor([ids]), use_cache=False).logits[0]
        output, gap = answer(model, ids)
        places = [tokens - 1] if tokens <= MIDDLE else [MIDDLE - 1, tokens - 1]
        logits = {str(place): [round(value, 5) for value in rows[place].tolist()] for place in places}
        prompts.append({"ids": ids, "output_ids": output, "smallest_gap": round(gap, 6), "logits": logits})
        print(family, tokens, len(set(output)), round(gap, 5), file=sys.stderr)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    return {"versions": versions, "max_tokens": MAX_TOKENS, "prompts": prompts}


def main() -> None:
    with torch.no_grad():
        for family in CONFIGS:
            text = json.dumps(golden(family))
            (HERE / f"{family}.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
