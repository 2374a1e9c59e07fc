"""The plan in effect: from the engine's resolved config, its log, and its passes."""

import pytest

from hearth.engine.effective import differences, eager_share, effective_plan, unused
from hearth.failure import Phase
from hearth.ladder import GraphPlan

ASKED = GraphPlan("breakable", "full", 32)
BOTH = {Phase.CAPTURE_PREFILL: 1.0, Phase.CAPTURE_DECODE: 1.0}
DECODE_ONLY = {Phase.LOAD: 9.0, Phase.CAPTURE_DECODE: 1.0}


def info(prefill="breakable", decode="full", max_bs=32):
    """As in `/server_info` of SGLang 0.5.23; seen on CPU: asked breakable, resolved disabled."""
    config = {"decode": {"backend": decode, "max_bs": max_bs, "bs": [1, 2]}, "prefill": {"backend": prefill}}
    return {"cuda_graph_backend_prefill": "breakable", "cuda_graph_config": config}


@pytest.mark.parametrize(
    ("server_info", "captured", "effective"),
    [
        (info(), BOTH, ASKED),
        (info(), {}, ASKED),
        (info(prefill="disabled"), DECODE_ONLY, GraphPlan("disabled", "full", 32)),
        (info(prefill="disabled", decode="disabled"), {}, GraphPlan("disabled", "disabled", 32)),
        (info(prefill=None), BOTH, GraphPlan("disabled", "full", 32)),
        (info(max_bs=24), BOTH, GraphPlan("breakable", "full", 24)),
        # The config names a backend and the log shows that it was skipped at capture.
        (info(), DECODE_ONLY, GraphPlan("disabled", "full", 32)),
        # Before 0.5.14, or no answer: the log alone.
        ({}, BOTH, ASKED),
        ({}, DECODE_ONLY, GraphPlan("disabled", "full", 32)),
        ({}, {}, GraphPlan("disabled", "disabled", 32)),
        ({"cuda_graph_config": "CudaGraphConfig(...)"}, BOTH, ASKED),
    ],
)
def test_effective_plan(server_info, captured, effective):
    assert effective_plan(ASKED, server_info, captured) == effective


@pytest.mark.parametrize(
    "junk", [None, [], {}, 3, {"prefill": 3, "decode": None}, {"decode": {"backend": []}}]
)
def test_an_answer_of_another_shape_is_no_error(junk):
    assert isinstance(effective_plan(ASKED, {"cuda_graph_config": junk}, BOTH), GraphPlan)


def test_differences_say_each_axis():
    assert differences(ASKED, ASKED) == []
    assert differences(ASKED, GraphPlan("disabled", "breakable", 16)) == [
        "prefill: asked for breakable, runs disabled",
        "decode: asked for full, runs breakable",
        "decode_max_bs: asked for 32, runs 16",
    ]
    assert differences(ASKED, GraphPlan("breakable", "disabled", None)) == [
        "decode: asked for full, runs disabled"
    ]
    assert differences(GraphPlan("breakable", "full"), ASKED) == []


def test_passes_that_use_no_graph_are_said():
    passes = {"prefill_none": 11.0, "decode_none": 2.0}
    assert unused(ASKED, passes) == ["prefill: asked for breakable, and all 11 passes ran without a graph"]
    assert unused(GraphPlan("disabled", "disabled"), passes) == []
    assert unused(ASKED, {"prefill_none": 900.0, "prefill_cuda_graph": 1.0}) == []
    assert unused(ASKED, {}) == []


def test_eager_share():
    assert eager_share({}, "decode") is None
    assert eager_share({"decode_none": 1.0, "decode_cuda_graph": 3.0}, "decode") == 0.25
