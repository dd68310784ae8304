"""The verb that shows the installed packages, and where each target runs."""

import argparse
import json

from ..arguments import Parser
from ..terminal import say
from .verbs import add_shared, verb


def doctor_arguments(parser: Parser) -> None:
    add_shared(parser, "--json")


@verb("show installed packages, and where each target runs", doctor_arguments, extras="cpu")
def doctor(args: argparse.Namespace) -> None:
    from ..inference.devices import facts

    details = facts()
    say(json.dumps(details) if args.json else report(details))


def report(facts: dict) -> str:
    """Return `facts`, the result of `devices.facts`, as lines of text, with the devices of each
    target."""
    from ..targets.registry import targets

    quota = facts["cpu_quota"]
    rows = [
        ("python", facts["python"]),
        *facts["packages"].items(),
        ("providers", ", ".join(facts["providers"]) or "none: onnxruntime is not installed"),
        *(("library", place) for place in facts["libraries"].values() or ["none of CUDA"]),
        (
            "cpu",
            f"{facts['processor']}: "
            f"{' '.join(facts['instructions']) or 'no known int8 instructions'}",
        ),
        *([("cpu quota", f"{quota:g} of {facts['cpus']} CPUs")] if quota else []),
        *(("gpu", ", ".join(gpu.values())) for gpu in facts["gpus"] or [{"name": "none"}]),
    ]
    lines = [f"{name:<12} {value}" for name, value in rows]
    if facts["onnxruntime_problem"]:
        lines += [f"no target runs: {facts['onnxruntime_problem']}"]
    elif not facts["providers"]:
        lines += ["no target runs: pip install 'vanilla-transformer[cpu]', or [gpu] for CUDA"]
    else:
        lines += [runs_on(target.name, target.default_device, facts) for target in targets()]
    problem = facts["tensorrt_problem"]
    lines += [
        f"TensorRT does not run: {problem}"
        if problem
        else "TensorRT is available: --device tensorrt"
    ]
    return "\n".join(lines)


def runs_on(target: str, device: str, facts: dict) -> str:
    if device == "cpu":
        return f"target {target} runs on the CPU, with {facts['threads']} threads"
    problem = facts[f"{device}_problem"]
    return (
        f"target {target} does not run: {problem}"
        if problem
        else f"target {target} runs on the GPU"
    )
