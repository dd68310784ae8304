"""The kernels that ran, from the profiles of onnxruntime."""

import json
from collections import Counter
from pathlib import Path

MEMCPY = ("MemcpyFromHost", "MemcpyToHost")
Kernels = dict[str, dict[str, dict[str, int]]]  # role -> provider -> operator -> number of nodes


def read_kernels(directory: Path) -> Kernels:
    """Return the number of nodes that ran for each role, provider and operator, from the profiles
    in `directory`. The name of a profile begins with the role of its graph and "_"."""
    kernels: Kernels = {}
    for path in sorted(directory.glob("*.json")):
        nodes = {
            event["name"]: (event["args"]["provider"], event["args"]["op_name"])
            for event in json.loads(path.read_text(encoding="utf-8"))
            if event.get("cat") == "Node" and event.get("args", {}).get("provider")
        }
        for (provider, operator), count in sorted(Counter(nodes.values()).items()):
            role = kernels.setdefault(path.name.partition("_")[0], {})
            role.setdefault(provider, {})[operator] = count
    return kernels


def count_copies(kernels: Kernels, role: str) -> int:
    """Return the number of nodes of the graph of `role` that copy between host and device."""
    return sum(
        count
        for operators in kernels[role].values()
        for operator, count in operators.items()
        if operator in MEMCPY
    )


def describe_kernels(kernels: Kernels) -> str:
    """Return the number of nodes of each graph by provider, and its copies, as one line."""
    parts = []
    for role, providers in kernels.items():
        nodes = [
            f"{sum(operators.values())} nodes on {provider.removesuffix('ExecutionProvider')}"
            for provider, operators in providers.items()
        ]
        parts.append(f"{role} {' and '.join(nodes)}, {count_copies(kernels, role)} Memcpy")
    return "; ".join(parts)
