"""The report of `pyg-direct doctor`: facts, measured rates, the plan of `auto` and findings, and their tables."""

from __future__ import annotations

from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pyg_direct.cli.advice import Finding, Graph, find_faults, judge_plan, judge_rates, plan_placement
from pyg_direct.cli.machine import OPTIONAL, collect_facts, measure_host_memory
from pyg_direct.errors import PygDirectError
from pyg_direct.loader.memory_placement import describe
from pyg_direct.profiling import show_bytes
from pyg_direct.progress import show_wait
from pyg_direct.runtime.cuda.memory import choose_host_memory

_STYLES = {"fix": "bold red", "hint": "yellow", "note": "dim"}


def examine(graph: Graph | None, free: int | None, *, measure: bool) -> dict[str, Any]:
    """Collect the facts about this machine, as JSON can hold them, with the faults found as `findings`.

    Args:
        graph: The size of a graph to place; None for none.
        free: Free bytes of GPU memory to place it in; None for the free bytes of this machine.
        measure: Whether the link to host memory is measured, if there is a GPU.
    """
    with show_wait("looking at this machine"):
        facts = collect_facts()
    facts |= {"measured": [], "host_memory": None, "plan": None}
    findings = find_faults(facts)
    if facts["gpus"]:
        findings += _look_at_link(facts, measure)
    if graph is not None:
        if free is None and facts["gpus"]:
            free = facts["gpus"][torch.cuda.current_device()]["free_bytes"]
        plan = plan_placement(graph, free, facts["host_memory"] or "unified")
        facts["plan"] = {**graph._asdict(), "free_gpu_bytes": free, "gpu_bytes": plan.gpu_bytes,
                         "host_bytes": plan.host_bytes, "parts": [part._asdict() for part in plan.parts],
                         "line": describe(plan.parts)}  # fmt: skip
        findings += judge_plan(plan, facts["memory"]["available_bytes"])
    findings.sort(key=lambda finding: list(_STYLES).index(finding.level))
    facts["findings"] = [finding._asdict() for finding in findings]
    return facts


def _look_at_link(facts: dict[str, Any], measure: bool) -> list[Finding]:
    """Measure the current GPU, and note which host memory `auto` takes for it."""
    index = torch.cuda.current_device()
    try:
        facts["host_memory"] = choose_host_memory(index)
        if not measure:
            return []
        with show_wait("measuring host memory"):
            rates = measure_host_memory(index)
    except (PygDirectError, RuntimeError) as error:
        return [Finding("fix", f"GPU {index} could not be measured: {error}", "see whether other programs can use it")]
    facts["measured"] = [rates]
    return list(judge_rates(rates, facts["host_memory"]))


def print_report(facts: dict[str, Any]) -> None:
    """Print tables, and advice.

    Args:
        facts: As of `examine`.
    """
    findings = [Finding(**finding) for finding in facts["findings"]]
    console = Console(highlight=False)
    # Words of the system and paths, which may hold brackets, are no markup.
    for title, rows in _sections(facts).items():
        table = Table(title=title, title_justify="left", title_style="bold", show_header=False, min_width=60)
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for row in rows:
            table.add_row(*map(escape, row))
        if rows:
            console.print(table)
    table = Table(title="What to do", title_justify="left", title_style="bold", min_width=60)
    for name in ("", "found", "do"):
        table.add_column(name, overflow="fold")
    for finding in findings:
        table.add_row(f"[{_STYLES[finding.level]}]{finding.level}[/]", *map(escape, (finding.what, finding.how)))
    if findings:
        console.print(table)
    num_fixes = sum(finding.level == "fix" for finding in findings)
    console.print("fine: nothing to fix" if num_fixes == 0 else f"to fix: {num_fixes}")


def _sections(facts: dict[str, Any]) -> dict[str, list[tuple[str, str]]]:
    """List the tables, a name and its text in each row."""
    cpu, memory, cuda, system = facts["cpu"], facts["memory"], facts["cuda"], facts["system"]
    limit = memory["page_lock_limit_bytes"]
    machine = [
        ("system", f"{system['system']} {system['machine']}, Python {system['python']}"),
        ("CPU", f"{cpu['cores']} cores, {cpu['kernel_threads']} threads for kernels, {cpu['torch_threads']} for torch"),
        ("memory", f"{show_bytes(memory['total_bytes'])}, {show_bytes(memory['available_bytes'])} free"),
        ("page-lock limit", "none" if limit is None else f"{show_bytes(limit)} (ulimit -l; CUDA's own does not count)"),
        ("NVIDIA driver", _join(cuda["driver"], cuda["driver_cuda"] and f"CUDA up to {cuda['driver_cuda']}")),
        ("GPU kernels", _join(cuda["ptx_in_wheel"] and "compiled in the wheel",
                              cuda["compiler"] and f"compiler {cuda['compiler']}")),
        ("compiled code", f"{facts['cache']['folder']}{'' if facts['cache']['writable'] else ' (cannot be written)'}"),
    ]  # fmt: skip
    machine += [(name, value or "(empty)") for name, value in facts["environment"].items()]
    versions = [("pyg_direct", facts["pyg_direct"])]
    versions += [(name, version or "missing") for name, version in facts["packages"].items()]
    extras = [(name, version or f"not installed; {OPTIONAL[name][1]}: extra {OPTIONAL[name][0]}")
              for name, version in facts["optional"].items()]  # fmt: skip
    sections = {"Machine": machine, "Versions": versions, "Optional": extras}
    sections |= {f"GPU {gpu['index']}": _describe_gpu(gpu) for gpu in facts["gpus"]}
    links = [(f"{link['reader']} reads {link['owner']}",
              "no" if not link["can_read"] else "over NVLink" if link["is_nvlink"] else "over PCIe")
             for link in facts["links"]]  # fmt: skip
    links += [("clique", ", ".join(map(str, clique))) for clique in facts["cliques"]]
    return sections | {"Between GPUs": links, "Measured": _describe_rates(facts), "auto": _describe_plan(facts["plan"])}


def _join(*words: Any) -> str:
    return ", ".join(word for word in words if word) or "none"


def _describe_gpu(gpu: dict[str, Any]) -> list[tuple[str, str]]:
    link = gpu["pcie"] or {}
    speed, width = link.get("current_link_speed"), link.get("current_link_width")
    best = _join(link.get("max_link_speed"), link.get("max_link_width") and f"{link['max_link_width']} lanes")
    return [
        ("name", f"{gpu['name']}, compute capability {'.'.join(map(str, gpu['compute_capability']))}"),
        ("memory", f"{show_bytes(gpu['total_bytes'])}, {show_bytes(gpu['free_bytes'])} free"),
        ("link", "unknown" if not link else f"{_join(speed, width and f'{width} lanes')}; at most {best}"),
        ("unified memory", "stays where it is" if gpu["unified_without_migration"] else "cannot be used"),
        ("ordinary memory", "read in place" if gpu["reads_ordinary_memory"] else "not read by the GPU"),
    ]  # fmt: skip


def _describe_rates(facts: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [] if facts["host_memory"] is None else [("auto takes", f"{facts['host_memory']} memory on the host")]

    def rate(value: float | None) -> str:
        return "not measured" if value is None else f"{value / 1e9:.1f} GB/s"

    for rates in facts["measured"]:
        rows.append(("page-locked copy", rate(rates["copy"])))
        for kind in ("unified", "pinned"):
            rows.append((f"{kind} memory", f"{rate(rates[f'{kind}_random'])} at random, "
                         f"{rate(rates[f'{kind}_ascending'])} in ascending order"))  # fmt: skip
        rows.append(("how", f"rows of {rates['row_bytes']} B out of {show_bytes(rates['table_bytes'])}, read by GPU "
                     f"{rates['gpu']}; took {rates['seconds']} s"))  # fmt: skip
    return rows


def _describe_plan(plan: dict[str, Any] | None) -> list[tuple[str, str]]:
    if plan is None:
        return []
    free = plan["free_gpu_bytes"]
    return [
        ("graph", f"{plan['num_nodes']} nodes, {plan['num_edges']} edges, {plan['num_features']} features"),
        ("GPU", "none" if free is None else f"{show_bytes(free)} free, {show_bytes(plan['gpu_bytes'])} taken"),
        ("host", f"{show_bytes(plan['host_bytes'])} taken"),
        ("placement", plan["line"]),
    ]
