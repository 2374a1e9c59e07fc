"""The graph plan that is really in effect, which need not be the one that was asked for.

SGLang may switch a graph backend off by itself and start without a word (DESIGN: a silent downgrade). The
resolved `cuda_graph_config` of `/server_info` (SGLang >= 0.5.14) says so; before, the capture lines do.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from hearth.failure import Phase
from hearth.ladder import DISABLED, GraphPlan


def effective_plan(
    asked: GraphPlan, server_info: Mapping[str, Any], captured: Collection[Phase]
) -> GraphPlan:
    """What the engine runs: from its own resolved config, else from the phases that it went through."""
    config = server_info.get("cuda_graph_config")
    if isinstance(config, Mapping):
        prefill = _backend(config.get("prefill")) or DISABLED
        decode = _backend(config.get("decode")) or DISABLED
        return GraphPlan(prefill, decode, asked.decode_max_bs)
    return GraphPlan(
        asked.prefill if Phase.CAPTURE_PREFILL in captured else DISABLED,
        asked.decode if Phase.CAPTURE_DECODE in captured else DISABLED,
        asked.decode_max_bs,
    )


def _backend(section: object) -> str | None:
    value = section.get("backend") if isinstance(section, Mapping) else None
    return str(value) if value else None


def differences(asked: GraphPlan, effective: GraphPlan) -> list[str]:
    """One sentence for each axis on which the engine runs something else than it was asked for."""
    return [
        f"{axis}: asked for {want}, runs {have}"
        for axis, want, have in (
            ("prefill", asked.prefill, effective.prefill),
            ("decode", asked.decode, effective.decode),
        )
        if want != have
    ]


def eager_share(passes: Mapping[str, float], phase: str) -> float | None:
    """Share of a phase's (`prefill` or `decode`) passes that ran without a graph; None before any pass."""
    graph, none = passes.get(f"{phase}_cuda_graph", 0.0), passes.get(f"{phase}_none", 0.0)
    return none / (graph + none) if graph + none else None
