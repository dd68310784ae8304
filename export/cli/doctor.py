"""What each target runs on here, in words."""

from ..targets.registry import targets


def report(found: dict) -> str:
    """`devices.facts` in lines, and what each target runs on."""
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
