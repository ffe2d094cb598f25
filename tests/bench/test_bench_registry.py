"""Which rows there are, and how settings are read."""

import argparse

import pytest

from bench.peers import PEERS
from bench.registry import LINEARS, TOKENS, cases
from bench.registry import PEERS as NAMES
from bench.settings import MODES, Settings, add_arguments, from_options


def parsed(*arguments):
    parser = argparse.ArgumentParser()
    add_arguments(parser.add_argument)
    return from_options(parser.parse_args(arguments))


@pytest.mark.parametrize("mode", MODES)
def test_rows_are_unique_and_name_known_peers(mode):
    found = cases(parsed("--mode", mode))
    rows = [row for case in found for row in case.row_ids]
    assert len(rows) == len(set(rows))
    for case in found:
        assert {"frozen", "fastlora"} <= set(case.peers)
        assert set(case.peers) | set(case.left_out) == set(NAMES) == set(PEERS)
        if case.op != "import":
            assert "peft" in case.peers
            # A peer that is not run says why.
            assert all(case.left_out.values())


def test_the_default_run_covers_every_shape_and_every_m():
    found = cases(parsed())
    for dims in LINEARS:
        for m in TOKENS:
            assert [
                c
                for c in found
                if (c.op, c.dims, c.m, c.dtype) == ("linear", dims, m, "float32")
                and c.dropouts == (0.0, 0.1)
            ], (dims, m)
    for op in ("qkv", "mlp", "embedding"):
        assert {c.m for c in found if c.op == op and c.dtype == "float32"} == set(TOKENS)
    assert {(c.dims, c.dtype) for c in found if c.op == "model"} == {
        ((4, 128), "float32"),
        ((4, 128), "bfloat16"),
    }


@pytest.mark.parametrize("mode", MODES)
def test_least_rounds(mode):
    for case in cases(parsed("--mode", mode)):
        slow = case.op == "model" and case.dtype != "float32"
        assert case.repeats >= (3 if slow else 7)


def test_the_half_precision_model_comes_last_and_every_op_can_be_asked_for():
    assert cases(parsed())[-1].id == "model-4x128-bfloat16"
    for op in ("import", "model", "linear", "qkv", "mlp", "embedding"):
        assert {case.op for case in cases(parsed("--only", op))} == {op}
    assert {c.dtype for c in cases(parsed("--dtypes", "bfloat16"))} == {"bfloat16"}
    assert [c.id for c in cases(parsed("--rows", "qkv-576x192-M16-float32"))] == [
        "qkv-576x192-M16-float32"
    ]


def test_memory_alone_takes_no_time():
    found = cases(parsed("--only", "memory", "--dtypes", "float32"))
    assert [(case.op, case.repeats) for case in found] == [("model", 0)]
    both = cases(parsed("--only", "memory,model", "--dtypes", "float32"))
    assert both[0].repeats >= 7


def test_a_part_does_not_stand_for_the_machine():
    assert parsed().complete
    assert parsed("--mode", "full").complete
    for part in (("--mode", "quick"), ("--only", "mlp"), ("--dtypes", "float32"), ("--rows", "M1")):
        assert not parsed(*part).complete


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--only", "mpl"), "only: got 'mpl', takes some of import, model"),
        (("--dtypes", "fp32"), "dtypes: got 'fp32', takes some of float32"),
        (("--repeats", "0"), "repeats: got 0, takes an integer from 1 up"),
        (("--budget", "0"), "budget_s: got 0.0"),
        (("--threads", "-1"), "threads: got -1"),
    ],
)
def test_bad_options_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        parsed(*arguments)


def test_an_unknown_mode_is_named():
    with pytest.raises(ValueError, match="mode: got 'slow', takes one of quick, default, full"):
        Settings(mode="slow")
