from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import pytest
from msgspec import structs

from trtpd.build.manifest import Manifest, is_elastic
from trtpd.build.spec import PipelineSpec, load_spec, parse_spec, settings_fault
from trtpd.errors import InputError, SpecError

SHORTEST = """\
model: models/smollm2
engine: openvino
pools:
  prefill: {instances: 1, tp: 1}
  decode: {instances: 1, tp: 1}
slo: {ttft_ms: 1000, tpot_ms: 80}
"""
POOLS: dict[str, Any] = {"prefill": {}, "decode": {}}


def refusal(tmp_path: Path, text: str) -> str:
    path = tmp_path / "pipeline.yaml"
    path.write_text(text)
    with pytest.raises(SpecError) as caught:
        load_spec(path)
    assert "\n" not in str(caught.value)
    return str(caught.value).replace(str(tmp_path) + "/", "")


def test_the_shortest_file_is_enough_and_its_model_is_beside_it(tmp_path: Path) -> None:
    (tmp_path / "pipeline.yaml").write_text(SHORTEST)
    spec = load_spec(tmp_path / "pipeline.yaml")
    assert spec.model == str(tmp_path / "models" / "smollm2")
    assert spec.slo.tpot_ms == 80.0
    assert list(spec.pools.given()) == ["prefill", "decode"]


def test_hosts_are_a_file_beside_the_pipeline_or_a_list(tmp_path: Path) -> None:
    path = tmp_path / "pipeline.yaml"
    path.write_text(
        "model: m\npools: {prefill: {tp: 2, hosts: my.hosts}, decode: {tp: 4, hosts: [here:2, 10.0.0.7:2]}}\n"
    )
    pools = load_spec(path).pools.given()
    assert pools["prefill"].hosts == str(tmp_path / "my.hosts")
    assert pools["decode"].hosts == ["here:2", "10.0.0.7:2"]
    assert "pools.decode.hosts" in refusal(
        tmp_path, "model: m\npools: {prefill: {}, decode: {hosts: ['a --mca x y']}}\n"
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (SHORTEST.replace("instances: 1, tp: 1}\n  decode", "instnces: 1}\n  decode"),
         "pipeline.yaml:4: pools.prefill.instnces: unknown key; did you mean instances?"),
        (SHORTEST + "kv:\n  tokens_per_blok: 32\n",
         "pipeline.yaml:8: kv.tokens_per_blok: unknown key; did you mean tokens_per_block?"),
        (SHORTEST + "digests: false\n",
         "pipeline.yaml:7: digests: unknown key; it belongs at transfer.digests"),
        (SHORTEST + "zzz: 1\n", "pipeline.yaml:7: zzz: unknown key; known here: model, name, engine"),
        (SHORTEST.replace("tpot_ms: 80", "tpot_ms: fast"),
         "pipeline.yaml:6: slo.tpot_ms: is 'fast'; it must be a number or auto"),
        (SHORTEST.replace("tpot_ms: 80", "tpot_ms: .inf"), "slo.tpot_ms: is inf; it must be a finite number"),
        (SHORTEST + "kv: {tokens_per_block: 0}\n",
         "pipeline.yaml:7: kv.tokens_per_block: is 0; it must be at least 1 or auto"),
        (SHORTEST + "kv: {tokens_per_block: 1.5}\n", "must be a whole number or auto"),
        (SHORTEST + "kv: {dtype: fp4}\n", "kv.dtype: is 'fp4'; it must be one of 'f32', 'bf16', 'f16'"),
        (SHORTEST + "tensorrt_llm: {gpu: v100}\n", "tensorrt_llm: gpu is 'v100'; it must be one of a100_40gb"),
        (SHORTEST + "precision: f64\n", "precision: is 'f64'; it must be one of"),
        (SHORTEST + "transfer: {digests: 1}\n", "transfer.digests: is 1; it must be true or false"),
        (SHORTEST + "transfer: shm\n", "transfer: is 'shm'; it must be a mapping of keys"),
        (SHORTEST.replace("openvino", "vllm"), "engine: is 'vllm'; it must be one of 'openvino'"),
        (SHORTEST.replace("tp: 1}\n  decode", "tp: 1, cores: [0, x]}\n  decode"), "pools.prefill.cores[1]: is 'x'"),
        (SHORTEST.replace("tp: 1}\n  decode", "tp: true}\n  decode"), "is True; it must be a whole number"),
        (SHORTEST.replace("model: models/smollm2\n", ""), "pipeline.yaml: model: is missing"),
        (SHORTEST + "name: ''\n", "pipeline.yaml:7: name: is ''; it must be a text that isn't empty"),
        (SHORTEST + "slo: {}\n", "pipeline.yaml:7: slo: given twice, first in line 6"),
        ("- a\n", "must hold keys"),
        ("", "must hold keys"),
        ("model: [1,\n", "not valid YAML"),
        ("model: &a [*a]\nmodle: 1", "pipeline.yaml:1: an alias stands within its own anchor"),
        (SHORTEST + "1: 2\n", "pipeline.yaml:7: pipeline: a key is 1, which is no text; write it in quotes"),
        (SHORTEST + "scheduler: {tenants: {true: 2}}\n", "pipeline.yaml:7: scheduler.tenants: a key is true"),
        (SHORTEST + "kv:\n  max_seq_tokens: " + "9" * 5000, "pipeline.yaml:8: not valid YAML ('999"),
        (SHORTEST + "kv: {max_seq_tokens: 0x" + "f" * 5000 + "}", "is a number of 20000 bits; it must be at most"),
        (SHORTEST + "name: 2026-13-45\n", "pipeline.yaml:7: not valid YAML ('2026-13-45' can't be read as timestamp"),
        (SHORTEST + "name: 2026-01-02\n", "pipeline.yaml:7: name: is 2026-01-02 (a date); it must be a text"),
        (SHORTEST + "name: !!bool maybe\n", "can't be read as bool"),
        (SHORTEST.replace("models/smollm2", '"a\\0b"'), "can't be a path"),
        (SHORTEST.replace("models/smollm2", "~no-such-user-here/m"), "no such home folder"),
        (SHORTEST + "transfer: {path: tcp, listen: banana}\n",
         "pipeline.yaml:7: transfer.listen: is 'banana'; it must be an IP address, or a network"),
        (SHORTEST + "scheduler: {tenants: gold}\n", "is 'gold'; it must be a mapping of keys"),
        ("[" * 500, "nested too deeply"),
    ],
    ids=lambda text: text[-60:],
)  # fmt: skip
def test_a_wrong_file_is_refused_with_line_key_value_and_mend(tmp_path: Path, text: str, said: str) -> None:
    assert said in refusal(tmp_path, text)


def test_several_faults_are_told_together_up_to_three(tmp_path: Path) -> None:
    message = refusal(tmp_path, SHORTEST + "a1: 1\na2: 1\na3: 1\na4: 1\n")
    assert message.count("unknown key") == 3
    assert message.endswith("; and 1 more")


def test_text_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_bytes(b"model: \xff\n")
    with pytest.raises(SpecError, match="not UTF-8 text"):
        load_spec(tmp_path / "p.yaml")


def test_what_never_ends_is_no_pipeline_file() -> None:
    with pytest.raises(SpecError, match="so it is no pipeline file"):
        load_spec(Path("/dev/zero"))


def test_an_absent_file_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="trtpd init"):
        load_spec(tmp_path / "p.yaml")


@pytest.mark.parametrize(
    ("pools", "said"),
    [
        ({"prefill": {}}, "decode is missing"),
        ({"decode": {}, "mixed": {}}, "prefill is missing"),
        ({}, "pools: is empty"),
        ({"prefill": {"instances": 0}, "decode": {}}, "prefill.instances is 0; only mixed may have none"),
        ({"mixed": {"instances": 0}}, "must be at least 1"),
    ],
)
def test_pools_that_serve_nobody_are_refused(pools: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        parse_spec({"model": "m", "pools": pools})


@pytest.mark.parametrize("pools", [POOLS, {"mixed": {}}, POOLS | {"mixed": {"instances": 0}}])
def test_pools_that_serve_are_taken(pools: dict[str, Any]) -> None:
    assert list(parse_spec({"model": "m", "pools": pools}).pools.given()) == list(pools)


def test_auto_is_the_same_as_leaving_a_key_out() -> None:
    kv = {"dtype": "auto", "tokens_per_block": "auto", "max_seq_tokens": "auto"}
    assert parse_spec({"model": "m", "pools": POOLS, "kv": kv}) == parse_spec({"model": "m", "pools": POOLS})


def test_every_key_says_what_it_means() -> None:
    def undescribed(model: type[Any]) -> list[str]:
        found = []
        for name, field in model.model_fields.items():
            found += [] if field.description else [f"{model.__name__}.{name}"]
            found += undescribed(field.annotation) if hasattr(field.annotation, "model_fields") else []
        return found

    assert undescribed(PipelineSpec) == []


BOMB = "a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 30)
)


@pytest.mark.parametrize("text", [BOMB, SHORTEST + "tensorrt_llm: {gpu: &b [*b, *b]}\n"], ids=["bomb", "circle"])
def test_aliases_that_stand_for_too_much_are_refused_at_once(tmp_path: Path, text: str) -> None:
    assert "write out what is meant" in refusal(tmp_path, text)


def test_plain_data_is_shown_no_further_than_it_is_read() -> None:
    shared: Any = "x"
    for _ in range(60):
        shared = [shared, shared]
    with pytest.raises(SpecError, match="model: is ") as caught:
        parse_spec({"model": shared, "pools": POOLS})
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("value", [None, True, 3, -1, 1.5, float("nan"), "", "x", [], {}, [[]], {"a": {}}, 1 << 200])
def test_no_fault_is_told_in_the_words_of_the_library(value: Any) -> None:
    """Every key of every section is given a value of each kind."""

    def faults(model: type[Any], at: tuple[str, ...]) -> list[str]:
        found = []
        for name, field in model.model_fields.items():
            inner = [one for one in (field.annotation, *get_args(field.annotation)) if hasattr(one, "model_fields")]
            found += faults(inner[0], (*at, name)) if inner else []
            document: Any = {"model": "m", "pools": {"prefill": {}, "decode": {}, "mixed": {}}}
            place = document
            for key in at:
                place = place.setdefault(key, {})
            place[name] = value
            try:
                parse_spec(document)
            except SpecError as error:
                found.append(str(error))
        return found

    told = faults(PipelineSpec, ())
    assert told
    assert not [text for text in told if re.search(r"[Ii]nput|should|Keys|valid |constrained|list\[|\.str:", text)]


def test_a_builds_settings_that_were_edited_by_hand_are_named() -> None:
    manifest = Manifest(format=1, trtpd="0", model="m", pair_fingerprint="p", roles={}, settings={})
    good = {"model": "m", "pools": {**POOLS, "elastic": False}}
    assert settings_fault(structs.replace(manifest, settings=good)) is None
    for wrong in ({**POOLS, "elastic": 3}, 7):
        edited = structs.replace(manifest, settings={"model": "m", "pools": wrong})
        assert "pools" in str(settings_fault(edited))
        with pytest.raises(InputError, match=r"manifest\.json"):
            is_elastic(edited)
