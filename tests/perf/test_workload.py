from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trtpd.errors import InputError
from trtpd.perf.arrivals import parse
from trtpd.perf.lengths import LengthFit
from trtpd.perf.make_workload import KINDS, Wanted, check_wanted, make
from trtpd.perf.prompt_text import Renderer, Segment, segment_text
from trtpd.perf.traces import TraceOptions
from trtpd.perf.workload import Ask, Workload, load, save

SLICES = ["trace:azure-code", "trace:azure-conv", "trace:mooncake"]


def texts(workload: Workload) -> list[str]:
    renderer = Renderer()
    return [renderer.text(ask.segments) for ask in workload.asks]


@pytest.mark.parametrize("name", [*KINDS, *SLICES])
def test_a_workload_is_saved_and_replayed_byte_for_byte(name, tmp_path):
    made = make(Wanted(name=name, requests=12, seed=5, rate=2.0))
    for suffix in (".jsonl", ".jsonl.gz"):
        save(made, tmp_path / f"one{suffix}")
        again = make(Wanted(name=str(tmp_path / f"one{suffix}"), requests=3))
        save(again, tmp_path / f"two{suffix}")
        assert again == made
        assert (tmp_path / f"one{suffix}").read_bytes() == (tmp_path / f"two{suffix}").read_bytes()
        assert texts(again) == texts(made)


@pytest.mark.parametrize("name", KINDS)
def test_seeds_give_equal_workloads_and_other_seeds_others(name):
    wanted = Wanted(name=name, requests=30, seed=1, rate=1.0)
    assert make(wanted) == make(wanted)
    assert texts(make(wanted)) != texts(make(replace(wanted, seed=2)))


@pytest.mark.parametrize("name", KINDS)
def test_the_rate_counts_every_request_turns_of_sessions_included(name):
    made = make(Wanted(name=name, requests=1500, rate=20.0, arrivals=parse("even")))
    assert len(made.asks) == 1500
    assert 1500 / made.duration_s == pytest.approx(20.0, rel=0.05)


def test_an_agents_turns_repeat_the_whole_prompt_before_them_and_share_their_instruction():
    made = make(Wanted(name="agent", requests=60, rate=1.0))
    prompts = texts(made)
    follow = [ask for ask in made.asks if ask.after is not None]
    assert len(follow) > 30
    for number, ask in enumerate(made.asks):
        if ask.after is not None:
            assert prompts[number].startswith(prompts[ask.after])
            assert ask.at_s is None
    assert len({prompt[:1000] for prompt in prompts}) == 1


def test_rag_prompts_share_passages_and_no_question():
    made = make(Wanted(name="rag", requests=50, rate=1.0))
    passages = [segment for ask in made.asks for segment in ask.segments[1:-1]]
    assert len(set(passages)) < len(passages) / 2
    assert len({ask.segments[-1] for ask in made.asks}) == 50


def test_equal_ids_of_the_mooncake_trace_are_equal_text_also_after_scaling():
    whole = make(Wanted(name="trace:mooncake", requests=200))
    small = make(Wanted(name="trace:mooncake", requests=200, fit=LengthFit(scale=0.05)))
    for made in (whole, small):
        first = [texts_of(ask, 1) for ask in made.asks]
        assert len(set(first)) < len(first) / 2
    assert all(a.segments[0].seed == b.segments[0].seed for a, b in zip(whole.asks, small.asks, strict=True))
    assert small.asks[0].prompt_tokens == pytest.approx(whole.asks[0].prompt_tokens * 0.05, rel=0.05)


def texts_of(ask: Ask, segments: int) -> str:
    return Renderer().text(ask.segments[:segments])


def test_a_traces_instants_can_be_stretched_or_given_a_rate():
    own = make(Wanted(name="trace:azure-code", requests=300))
    slow = make(Wanted(name="trace:azure-code", requests=300, trace=TraceOptions(time_scale=3.0)))
    rated = make(Wanted(name="trace:azure-code", requests=300, rate=0.5))
    assert slow.duration_s == pytest.approx(3 * own.duration_s, rel=1e-3)
    assert 300 / rated.duration_s == pytest.approx(0.5, rel=1e-3)
    gaps, rated_gaps = (np.diff([ask.at_s or 0.0 for ask in made.asks]) for made in (own, rated))
    assert np.allclose(gaps / gaps.sum(), rated_gaps / rated_gaps.sum(), atol=1e-4)


def test_any_csv_is_a_trace_once_its_columns_are_named(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("when,in,out\n2000,7,3\n1000,5,2\n3000,0,9\n")
    made = make(Wanted(name=f"trace:{path}", trace=TraceOptions(columns="time=when,prompt=in,output=out,unit=ms")))
    assert [(ask.at_s, ask.prompt_tokens, ask.max_tokens, ask.kind) for ask in made.asks] == [
        (0.0, 5, 2, "mine"),
        (1.0, 7, 3, "mine"),
    ]


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({}, "say with --columns"),
        ({"columns": "time=when,prompt=in,output=nope"}, "no column 'nope'"),
        ({"columns": "time=when,prompt=in"}, "'output' is missing"),
        ({"columns": "time=when,prompt=in,output=out,unit=h"}, "unit is 'h'"),
        ({"columns": "time=when,prompt=when,output=in,extra=x"}, "'extra' is not known"),
        ({"columns": "time=in,prompt=when,output=out"}, "line 2"),
        ({"columns": "time=when,prompt=in,output=out,hashes=ids"}, "no column 'ids'"),
        ({"columns": "time=when,prompt=in,output=out,block=16"}, "give hashes too"),
        ({"columns": "time=when,prompt=in,output=out", "offset": 9}, "no request left"),
    ],
)
def test_a_trace_that_cannot_be_read_says_where(tmp_path, options, fault):
    path = tmp_path / "mine.csv"
    path.write_text(
        "when,in,out\nsoon,7,3\n" if "when,prompt" in str(options) or not options else "when,in,out\nx,1,y\n"
    )
    if "offset" in options or "nope" in str(options) or "hashes" in str(options):
        path.write_text("when,in,out\n1,7,3\n")
    with pytest.raises(InputError, match=fault):
        make(Wanted(name=f"trace:{path}", trace=TraceOptions(**options)))


@given(
    lengths=st.lists(st.tuples(st.integers(1, 5000), st.integers(1, 2000)), min_size=1, max_size=40),
    bound=st.integers(2, 4000),
    scale=st.none() | st.floats(0.01, 10.0),
)
def test_fitted_requests_keep_their_bound_and_the_beginning_of_their_prompt(lengths, bound, scale):
    asks = [
        Ask(segments=(Segment(1, prompt), Segment(2 + number, 3)), max_tokens=output, kind="x", at_s=0.0)
        for number, (prompt, output) in enumerate(lengths)
    ]
    fitted, _ = LengthFit(scale=scale, max_total_tokens=bound).apply(asks)
    assert len(fitted) == len(asks)
    for before, after in zip(asks, fitted, strict=True):
        assert after.total_tokens <= bound
        assert after.prompt_tokens >= 1
        assert after.max_tokens >= 1
        assert [s.seed for s in after.segments] == [s.seed for s in before.segments][: len(after.segments)]


def test_what_fits_is_left_alone():
    asks = make(Wanted(name="chat", requests=50, rate=1.0)).asks
    fitted, notes = LengthFit(max_total_tokens=1_000_000).apply(asks)
    assert tuple(fitted) == asks
    assert notes == ()


@settings(deadline=None)
@given(seed=st.integers(0, 1 << 62), short=st.integers(1, 300), more=st.integers(0, 300))
def test_segments_of_one_seed_begin_alike(seed, short, more):
    assert segment_text(Segment(seed, short + more)).startswith(segment_text(Segment(seed, short)))


def test_every_word_of_a_prompt_is_one_token_of_the_demonstration_model(smollm2):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    ids = tokenizer.encode(segment_text(Segment(3, 2000)), add_special_tokens=False).ids
    assert len(ids) == 2000


def test_a_saved_workload_that_is_not_whole_or_not_ours_is_refused(tmp_path):
    made = make(Wanted(name="chat", requests=5, rate=1.0))
    path = tmp_path / "w.jsonl"
    save(made, path)
    lines = path.read_bytes().splitlines(keepends=True)
    for content, fault in [
        (b"", "it is empty"),
        (b"\n" + lines[0][:40] + b"\n", "line 2"),
        (b"{}\n", "not a saved workload"),
        (b"".join(lines[:-1]), "4 requests of 5"),
        (b"".join([*lines[:-1], b"[1]\n"]), "line 6"),
        (lines[0].replace(b'"trtpd_workload":1', b'"trtpd_workload":9') + b"".join(lines[1:]), "format 9"),
        (lines[0] + b"".join([*lines[1:-1], lines[-2]]), "other prompts"),
    ]:
        path.write_bytes(content)
        with pytest.raises(InputError, match=fault):
            load(path)


@pytest.mark.parametrize(
    ("wanted", "fault"),
    [
        (Wanted(name="chatt", rate=1.0), "not known"),
        (Wanted(name="chat"), "needs a rate"),
        (Wanted(name="chat", concurrency=2, rate=1.0), "a rate is given too"),
        (Wanted(name="chat", concurrency=0), "at least 1"),
        (Wanted(name="chat", requests=0, rate=1.0), "at least 1"),
        (Wanted(name="trace:nowhere.csv"), "no such file"),
        (Wanted(name="none.jsonl"), "can't be read"),
        (Wanted(name="trace:azure-code", rate=-1.0), "above 0"),
        (Wanted(name="chat", rate=1.0, seed=-1), "the seed is -1"),
        (Wanted(name="trace:azure-code", seed=1 << 63), "the seed is"),
        (Wanted(name="chat", rate=1.0, requests=10**12), "at most"),
        (Wanted(name="trace:~no-such-user-here/x.csv"), "no such home folder"),
        (Wanted(name="~no-such-user-here/x.jsonl"), "no such home folder"),
        (Wanted(name="chat", concurrency=2, arrivals=parse("even")), "--arrivals even and --concurrency 2"),
        (Wanted(name="chat", rate=1.0, trace=TraceOptions(time_scale=2.0)), "--time-scale 2.0 and --workload chat"),
        (Wanted(name="chat", rate=1.0, trace=TraceOptions(offset=3)), "--trace-offset 3 and --workload chat"),
        (Wanted(name="chat", rate=1.0, trace=TraceOptions(columns="a")), "--columns a and --workload chat"),
        (Wanted(name="trace:mooncake", rate=1.0, trace=TraceOptions(time_scale=2.0)), "--time-scale 2 and --rate 1"),
        (
            Wanted(name="trace:mooncake", concurrency=1, trace=TraceOptions(time_scale=0.5)),
            "--time-scale 0.5 and --concurrency 1",
        ),
    ],
)
def test_a_workload_that_cannot_be_made_says_why(wanted, fault):
    with pytest.raises(InputError, match=fault):
        make(wanted)


def test_a_request_that_could_never_start_is_refused():
    ask = Ask(segments=(Segment(1, 1),), max_tokens=1, kind="x")
    with pytest.raises(InputError, match="no instant"):
        Workload(name="w", seed=0, asks=(ask,))
    with pytest.raises(InputError, match="must follow one of"):
        Workload(name="w", seed=0, asks=(msgspec.structs.replace(ask, after=0),))


@pytest.mark.parametrize(
    "row", ["nan,5,5", "inf,5,5", "-inf,5,5", "0,1e9,5", f"0,{'9' * 18},5", f"0,{'9' * 5000},5", "0,5,nan"]
)
def test_a_trace_with_a_number_that_is_none_names_its_row(row, tmp_path):
    path = tmp_path / "t.csv"
    path.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n0,5,5\n{row}\n")
    with pytest.raises(InputError, match="line 3"):
        make(Wanted(name=f"trace:{path}"))


@pytest.mark.parametrize("start", range(10, 120, 10))
def test_a_packed_file_that_is_damaged_anywhere_is_refused_in_one_line(start, tmp_path):
    path = tmp_path / "w.jsonl.gz"
    save(make(Wanted(name="chat", requests=40, rate=1.0)), path)
    packed = bytearray(path.read_bytes())
    packed[start : start + 20] = bytes(20)
    path.write_bytes(packed)
    with pytest.raises(InputError, match=re.escape(str(path))):
        load(path)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"at_s": float("inf")}, "at_s and think_s"),
        ({"at_s": -1.0}, "at_s and think_s"),
        ({"segments": (Segment(1, 10**18),)}, "lengths are out of range"),
        ({"segments": (Segment(1, 10), Segment(2, -5))}, "lengths are out of range"),
    ],
)
def test_a_request_that_could_not_be_made_is_refused(changes, fault):
    ask = Ask(segments=(Segment(1, 5),), max_tokens=5, kind="x", at_s=0.0)
    with pytest.raises(InputError, match=fault):
        Workload(name="w", seed=0, asks=(msgspec.structs.replace(ask, **changes),))


def test_a_large_seed_is_saved_and_replayed(tmp_path):
    made = make(Wanted(name="chat", requests=3, rate=1.0, seed=(1 << 63) - 1))
    save(made, tmp_path / "w.jsonl")
    assert load(tmp_path / "w.jsonl") == made


HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (f"{HEADER}\n0,5,5\n\n1,5,5,9\n", "line 4 has 4 fields and the header 3"),
        (f"{HEADER}\n0,5\n", "line 2 has 2 fields and the header 3"),
        ("a,b\n1,2,3\n", "line 2 has 3 fields and the header 2"),
        (f"{HEADER}\n0,5,x\n", "line 2, column 'GeneratedTokens': 'x'"),
    ],
)
def test_a_csv_row_of_another_width_or_kind_is_named_by_its_line(content, fault, tmp_path):
    (tmp_path / "t.csv").write_text(content)
    with pytest.raises(InputError, match=fault):
        make(Wanted(name=f"trace:{tmp_path / 't.csv'}"))


def blocks(cell: str, tmp_path, suffix: str = "csv") -> list[int]:
    """Of a prompt of 30 tokens in blocks of 10."""
    path = tmp_path / f"t.{suffix}"
    path.write_text(f"t,p,o,h\n0,30,5,{cell}\n" if suffix == "csv" else f'{{"t":0,"p":30,"o":5,"h":{cell}}}\n')
    options = TraceOptions(columns="time=t,prompt=p,output=o,hashes=h,block=10")
    (ask,) = make(Wanted(name=f"trace:{path}", trace=options)).asks
    return [segment.seed for segment in ask.segments if segment.seed < 1 << 40]


@pytest.mark.parametrize(
    ("cell", "found"),
    [("46", [46]), ("4 6", [4, 6]), ('"[46, 47, 48]"', [46, 47, 48]), ('"46,47"', [46, 47]), ("", []), ("[]", [])],
)
def test_ids_of_shared_blocks_in_a_csv_stand_apart(cell, found, tmp_path):
    assert blocks(cell, tmp_path) == found


def test_ids_of_shared_blocks_in_json_are_a_list_or_such_text(tmp_path):
    assert blocks("[46, 47]", tmp_path, "jsonl") == [46, 47]
    assert blocks('"46"', tmp_path, "jsonl") == [46]


@pytest.mark.parametrize(
    ("cell", "suffix"),
    [("4;6", "csv"), ("-1", "csv"), ("1.5", "csv"), ("46", "jsonl"), ("[1.5]", "jsonl"), ("[true]", "jsonl")],
)
def test_ids_that_are_none_are_named_with_their_line(cell, suffix, tmp_path):
    with pytest.raises(InputError, match=r"line \d, column '\w+': hashes are"):
        blocks(cell, tmp_path, suffix)


def test_rows_of_a_trace_that_are_not_asked_are_counted_and_said(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text(f"{HEADER}\n0,5,5\n1,0,5\n2,5,0\n3,5,5\n")
    made = make(Wanted(name=f"trace:{path}", requests=9))
    assert len(made.asks) == 2
    assert made.notes[:2] == (
        "2 of the trace's 4 rows left out: no prompt or no answer in them",
        "9 requests were wanted, the trace has 2 from row 0 on",
    )
    assert make(Wanted(name="trace:mooncake", requests=40)).notes == ("the trace's own instants, times 1",)


def test_rows_of_one_instant_take_poisson_arrivals_at_a_wanted_rate_and_say_so():
    made = make(Wanted(name="trace:mooncake", requests=8, rate=1.5))
    assert len({ask.at_s for ask in made.asks}) == 8
    assert [ask.at_s for ask in made.asks] == [
        ask.at_s for ask in make(Wanted(name="trace:mooncake", requests=8, rate=1.5, arrivals=parse("poisson"))).asks
    ]
    assert "1.5 requests/s, poisson (the trace has all these 8 rows at one instant" in made.notes[-1]
    own = make(Wanted(name="trace:mooncake", requests=8))
    assert {ask.at_s for ask in own.asks} == {0.0}
    assert "all these 8 rows at one instant" in own.notes[-1]
    assert "at one instant" in make(Wanted(name="trace:azure-code", requests=1, rate=2.0)).notes[-1]
    assert "times" in make(Wanted(name="trace:azure-code", requests=2, rate=2.0)).notes[-1]


def test_rows_put_in_order_of_time_are_said(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text(f"{HEADER}\n9,9,9\n0,5,5\n3,6,6\n1,7,7\n")
    made = make(Wanted(name=f"trace:{path}", requests=4))
    assert [ask.prompt_tokens for ask in made.asks] == [5, 7, 6, 9]
    assert made.notes[0] == "the trace's rows put in order of time (2 of them came before the row above)"


PYTHON = ("invalid literal", "NoneType", "int()", "isoformat", "out of range", "could not convert", "Error(")


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        (b'{"timestamp": 0, "input_length": -3, "output_length": 5}', "'input_length': -3 tokens"),
        (b'{"timestamp": 0, "input_length": null, "output_length": 5}', "'input_length': null is not a whole number"),
        (b'{"timestamp": 0, "input_length": 3.7, "output_length": 5}', "'input_length': 3.7 is not"),
        (b'{"timestamp": 0, "input_length": true, "output_length": 5}', "'input_length': True is not"),
        (b'{"timestamp": 0, "input_length": [3], "output_length": 5}', "'input_length'"),
        (b'{"timestamp": 0, "input_length": 3, "output_length": "many"}', "'output_length': 'many' is not"),
        (b'{"timestamp": "noon", "input_length": 3, "output_length": 5}', "'timestamp': 'noon' is neither"),
        (b'{"timestamp": null, "input_length": 3, "output_length": 5}', "'timestamp': null is neither"),
        (b'{"timestamp": 0, "input_length": 3}', "no column 'output_length'"),
        (b'{"timestamp": 0, "input_length": 3, "outp', "no JSON object"),
    ],
)
def test_a_cell_of_a_trace_that_cannot_be_is_named_by_line_and_column_in_field_terms(row, fault, tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_bytes(b'{"timestamp": 0, "input_length": 3, "output_length": 5}\n\n' + row + b"\n")
    with pytest.raises(InputError) as found:
        make(Wanted(name=f"trace:{path}"))
    assert "line 3" in str(found.value)
    assert fault in str(found.value)
    assert not any(word in str(found.value) for word in PYTHON)


@pytest.mark.parametrize(
    ("columns", "fault"),
    [("time=a", "'output' is missing"), ("", "not known"), ("time=a,prompt=b,output=c,time=d", "time is there twice"),
     ("time=a,prompt=,output=c", "prompt names nothing"), (",", "not known"), ("a;b", "not known")],
)  # fmt: skip
def test_columns_that_cannot_be_are_refused_before_the_trace_is_read(columns, fault):
    with pytest.raises(InputError, match=fault):
        check_wanted(Wanted(name="trace:no-such-file.csv", trace=TraceOptions(columns=columns)))


def test_a_folder_is_not_said_to_be_missing(tmp_path):
    with pytest.raises(InputError, match="is a folder, not a file"):
        make(Wanted(name=f"trace:{tmp_path}"))


@pytest.mark.parametrize("name", ["w.json", "w.jsonl.zst", "trace:w.jsonl"])
def test_a_workload_is_saved_only_by_a_name_under_which_it_is_replayed(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"end it in \.jsonl"):
        save(make(Wanted(name="chat", requests=2, rate=1.0)), Path(name))
    assert not list(tmp_path.iterdir())
