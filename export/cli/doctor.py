"""The verb that shows what is installed, and what each target runs on here."""

import argparse
import json

from ..arguments import Parser
from ..terminal import say
from .verbs import verb


def doctor_arguments(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


@verb("show what is installed here, and what will run where", doctor_arguments, extras="cpu")
def doctor(args: argparse.Namespace) -> None:
    from ..inference.devices import facts

    found = facts()
    say(json.dumps(found) if args.json else report(found))


def report(found: dict) -> str:
    """Return `devices.facts` as lines, with the devices of each target."""
    from ..targets.registry import targets

    lines = [f"python       {found['python']}"]
    lines += [f"{name:<12} {number}" for name, number in found["packages"].items()]
    lines += [
        f"providers    {', '.join(found['providers']) or 'none: onnxruntime is not installed'}"
    ]
    lines += [f"libraries    {', '.join(found['libraries']) or 'none of those that CUDA needs'}"]
    lines += [
        f"processor    {found['processor']}: "
        f"{' '.join(found['instructions']) or 'no instructions for integers known'}"
    ]
    lines += [f"gpu          {found['gpu'] or 'none'}"]
    if found["onnxruntime_problem"]:
        lines += [f"no target runs: {found['onnxruntime_problem']}"]
    elif not found["providers"]:
        lines += ["no target runs: pip install 'vanilla-transformer[cpu]', or [gpu] for CUDA"]
    else:
        lines += [runs_on(target.name, target.default_device, found) for target in targets()]
    problem = found["tensorrt_problem"]
    lines += [
        f"TensorRT does not run: {problem}"
        if problem
        else "TensorRT can be asked for: --device tensorrt"
    ]
    return "\n".join(lines)


def runs_on(target: str, device: str, found: dict) -> str:
    if device == "cpu":
        return f"target {target} runs on the CPU, with {found['threads']} threads"
    problem = found[f"{device}_problem"]
    return (
        f"target {target} does not run: {problem}"
        if problem
        else f"target {target} runs on the GPU"
    )
