from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from trtpd_testing.tiny import write_model

from trtpd.build.checkpoint import open_checkpoint
from trtpd.build.gguf_model import GgufFile
from trtpd.build.gguf_tokenizer import build_tokenizer
from trtpd.errors import InputError
from trtpd.perf import engine_bench
from trtpd.perf.engine_bench import rounds_of
from trtpd.perf.engine_results import OURS, Results, Samples, rows_of
from trtpd.perf.llama_gguf import write_gguf
from trtpd.perf.measured import Cell

PREFILL = Cell(kind="prefill", tokens=512, batch=4)
DECODE = Cell(kind="decode", tokens=500, batch=1)


def test_a_ratio_is_to_the_best_of_the_others_by_medians_and_its_spread_that_of_the_rounds() -> None:
    results = Results(None)
    for ours, bf16, f16 in ((4.0, 2.2, 3.0), (1.0, 2.2, 2.0), (1.1, 2.2, 1.9)):
        results.add("bf16", 1, PREFILL, {OURS: ours, "BF16": bf16, "F16": f16})
    (row,) = rows_of(results)
    assert row["ratio"] == pytest.approx(2.0 / 1.1)
    assert row["spread"] == pytest.approx((0.75, 2.0))
    assert not row["met"]


def test_one_round_has_no_spread() -> None:
    results = Results(None)
    for count, said in ((1, "1.50, target 1.0 met, 1 samples"), (2, "1.50 (1.50..1.50 by round), target 1.0 met")):
        results.add("f32", 1, DECODE, {OURS: 2.0, "F32": 3.0})
        (row,) = rows_of(results)
        assert (row["spread"] is None) is (count == 1)
        assert said in engine_bench.words(row)


def test_results_of_several_runs_add_up(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    for cell in (PREFILL, DECODE, DECODE):
        Results(path).add("int8", 2, cell, {OURS: 1.0, "Q8_0": 1.0})
    rows = list(rows_of(Results(path)))
    assert [row["cell"] for row in rows] == ["decode 500x1", "prefill 512x4"]
    assert [row["samples"] for row in rows] == [2, 1]
    assert [row["met"] for row in rows] == [True, False]


def test_a_round_that_one_side_lacks_counts_on_none(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    made = [(OURS, [1.0, 1.0, 9.0]), ("Q8_0", [2.0, 4.0])]
    samples = [Samples(width="int8", threads=1, side=side, cell=DECODE, seconds=seconds) for side, seconds in made]
    path.write_bytes(msgspec.json.encode(samples))
    (row,) = rows_of(Results(path))
    assert (row["ratio"], row["spread"], row["samples"]) == (3.0, (2.0, 4.0), 2)


class Clock:
    """Passes by 1 with every measurement, each of which takes as long as the time it ends at."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def measure(self, cell: Cell) -> float:
        self.now_s += 1.0
        return self.now_s


def test_a_round_that_time_cuts_short_is_dropped_and_what_warms_up_is_no_sample() -> None:
    clock = Clock()
    sides = {OURS: clock.measure, "F32": clock.measure}
    found = list(rounds_of([DECODE], lambda _: sides, rounds=9, late=lambda: clock.now_s >= 7.0))
    assert found == [(DECODE, {OURS: 2.0, "F32": 4.0}), (DECODE, {OURS: 5.0, "F32": 6.0})]


def test_the_least_rounds_are_made_however_late_it_is() -> None:
    sides = {OURS: Clock().measure}
    found = list(rounds_of([DECODE, PREFILL], lambda _: sides, rounds=9, late=lambda: True, least=1))
    assert [cell for cell, _ in found] == [DECODE, PREFILL]


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text("{}")
    with pytest.raises(InputError, match="not results"):
        Results(path)


def test_a_model_as_gguf_reads_back_as_itself(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_model(tmp_path / "tiny"))
    write_gguf(checkpoint, tmp_path / "tiny.gguf", "F32")
    found = GgufFile(tmp_path / "tiny.gguf")
    assert found.architecture.num_key_value_heads == checkpoint.architecture.num_key_value_heads
    for name in ("model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight"):
        assert np.array_equal(found.read(name), checkpoint.read(name))


def small_tokenizer(cut: list[Any]) -> Tokenizer:
    vocab = {token: number for number, token in enumerate(["Ġ", "a", "b", "1", "2", "Ġa", "ab", "12"])}
    merges = [("Ġ", "a"), ("a", "b"), ("1", "2")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cut, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True, normalized=False)])
    return tokenizer


@pytest.mark.parametrize("cut", [[pre_tokenizers.Digits(individual_digits=True)], []], ids=["smollm", "gpt-2"])
def test_a_model_as_gguf_cuts_text_as_its_own_tokenizer_does(tmp_path: Path, cut: list[Any]) -> None:
    model, tokenizer = write_model(tmp_path / "tiny"), small_tokenizer(cut)
    tokenizer.save(str(model / "tokenizer.json"))
    write_gguf(open_checkpoint(model), tmp_path / "tiny.gguf", "F32", tokenizer=True)
    found = build_tokenizer(GgufFile(tmp_path / "tiny.gguf"))
    for text in (" ab a 12ab", "a<|end|> 2 12"):
        assert found.encode(text).ids == tokenizer.encode(text).ids


def test_a_tokenizer_gguf_has_no_name_for_is_refused(tmp_path: Path) -> None:
    model, tokenizer = write_model(tmp_path / "tiny"), small_tokenizer([pre_tokenizers.Punctuation()])
    tokenizer.save(str(model / "tokenizer.json"))
    with pytest.raises(InputError, match="cuts text by Punctuation, ByteLevel"):
        write_gguf(open_checkpoint(model), tmp_path / "tiny.gguf", "F32", tokenizer=True)


@pytest.mark.slow
def test_the_benchmark_measures_both_sides_of_a_real_model(
    smollm2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("xllamacpp")
    options = ["--model", str(smollm2), "--width", "int8", "--rounds", "1", "--cells", "decode-64x2", "--json"]
    assert engine_bench.main([*options, "--cache", str(tmp_path)]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["tokens_per_s"] > 0
    assert row["llama_cpp_tokens_per_s"]["Q8_0"] > 0
