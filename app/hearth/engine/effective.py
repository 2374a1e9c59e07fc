"""The graph plan that is really in effect, which need not be the one that was asked for.

SGLang may switch a graph backend off by itself and start without a word (DESIGN: a silent downgrade). Three
things tell: the resolved `cuda_graph_config` of `/server_info` (SGLang >= 0.5.14); the capture lines in the
log, as a backend that the config names may still be skipped at capture ("Disable prefill CUDA graph because",
0.5.23's cuda_graph_setup.py); and, once there was work, the count of passes with and without a graph.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from hearth.failure import Phase
from hearth.ladder import DISABLED, GraphPlan

_CAPTURES = frozenset({Phase.CAPTURE_PREFILL, Phase.CAPTURE_DECODE})


def effective_plan(
    asked: GraphPlan, server_info: Mapping[str, Any], captured: Collection[Phase]
) -> GraphPlan:
    """What the engine runs: its own resolved config, less what its log says was not captured."""
    config = server_info.get("cuda_graph_config")
    if not isinstance(config, Mapping):
        return _captured_of(asked, captured)
    prefill, decode = _backend(config.get("prefill")), _backend(config.get("decode"))
    plan = GraphPlan(prefill or DISABLED, decode or DISABLED, _size(config.get("decode"), asked))
    # No capture line at all may be a wording that nobody knows yet; one of the two is a fact about the other.
    return _captured_of(plan, captured) if _CAPTURES & set(captured) else plan


def _captured_of(plan: GraphPlan, captured: Collection[Phase]) -> GraphPlan:
    return replace(
        plan,
        prefill=plan.prefill if Phase.CAPTURE_PREFILL in captured else DISABLED,
        decode=plan.decode if Phase.CAPTURE_DECODE in captured else DISABLED,
    )


def _backend(section: object) -> str | None:
    value = section.get("backend") if isinstance(section, Mapping) else None
    return value if isinstance(value, str) and value else None


def _size(section: object, asked: GraphPlan) -> int | None:
    """The resolved decode_max_bs, where one was asked for or the engine chose one."""
    value = section.get("max_bs") if isinstance(section, Mapping) else None
    return value if isinstance(value, int) and value > 0 else asked.decode_max_bs


def differences(asked: GraphPlan, effective: GraphPlan) -> list[str]:
    """One sentence for each axis on which the engine runs something else than it was asked for."""
    axes: list[tuple[str, object, object]] = [
        ("prefill", asked.prefill, effective.prefill),
        ("decode", asked.decode, effective.decode),
    ]
    if asked.decode_max_bs is not None and effective.decode != DISABLED:
        axes.append(("decode_max_bs", asked.decode_max_bs, effective.decode_max_bs))
    return [f"{axis}: asked for {want}, runs {have}" for axis, want, have in axes if want != have]


def unused(asked: GraphPlan, passes: Mapping[str, float], at_least: float = 3.0) -> list[str]:
    """One sentence for each axis whose graphs were asked for and that no pass uses.

    `passes`: EngineSamples.passes. Says nothing before `at_least` passes of a kind: a prompt above the
    largest bucket rightly runs without a graph.
    """
    return [
        f"{axis}: asked for {backend}, and all {passes[f'{axis}_none']:g} passes ran without a graph"
        for axis, backend in (("prefill", asked.prefill), ("decode", asked.decode))
        if backend != DISABLED and eager_share(passes, axis) == 1.0 and passes[f"{axis}_none"] >= at_least
    ]


def eager_share(passes: Mapping[str, float], phase: str) -> float | None:
    """Share of a phase's (`prefill` or `decode`) passes that ran without a graph; None before any pass."""
    graph, none = passes.get(f"{phase}_cuda_graph", 0.0), passes.get(f"{phase}_none", 0.0)
    return none / (graph + none) if graph + none else None
